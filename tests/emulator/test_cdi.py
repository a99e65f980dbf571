"""`cudackpt emulator cdi`: what a container engine needs to give these GPUs to a container. That it
works is shown by tests/runtimes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from cudackpt.emulator import Emulator

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_specification_names_what_is_there(cudackpt: Run, emulator: Emulator) -> None:
    done = cudackpt("emulator", "cdi")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["cdiVersion"], found["kind"]) == ("0.6.0", "cudackpt.io/gpu")
    (device,) = found["devices"]
    edits = device["containerEdits"]
    assert device["name"] == "all"
    assert f"CUDACKPT_EMULATOR={emulator.path}" in edits["env"]
    places = {mount["containerPath"]: Path(mount["hostPath"]) for mount in edits["mounts"]}
    assert set(places) == {
        "/usr/lib/cudackpt-emulator/libcuda.so.1",
        "/usr/lib/cudackpt-emulator/libnvidia-ml.so.1",
        str(emulator.path.parent),
    }
    assert all(path.exists() for path in places.values())
    assert all(Path(node["path"]).is_char_device() for node in edits["deviceNodes"])


def test_it_is_written_whole(cudackpt: Run, tmp_path: Path) -> None:
    path = tmp_path / "cdi" / "cudackpt.json"
    assert cudackpt("emulator", "cdi", "--output", path).returncode == 0
    assert json.loads(path.read_text()) == json.loads(cudackpt("emulator", "cdi").stdout)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    (tmp_path / "file").write_text("")
    failed = cudackpt("emulator", "cdi", "--output", tmp_path / "file" / "y")
    assert failed.returncode == 15 and "cannot write" in failed.stderr


def test_there_has_to_be_an_emulator(
    cudackpt: Run, emulator_environ: dict[str, str], tmp_path: Path
) -> None:
    emulator_environ["CUDACKPT_EMULATOR"] = str(tmp_path / "none")
    failed = cudackpt("emulator", "cdi")
    assert failed.returncode == 15 and "no emulator answers" in failed.stderr
