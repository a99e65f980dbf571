# SPDX-License-Identifier: Apache-2.0
"""`gpustasis emulator cdi`: what a container engine needs to give these GPUs to a container. That
it works is shown by tests/runtimes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

from gpustasis.emulator import Emulator

Run = Callable[..., subprocess.CompletedProcess[str]]


def test_the_specification_names_what_is_there(gpustasis: Run, emulator: Emulator) -> None:
    done = gpustasis("emulator", "cdi")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["cdiVersion"], found["kind"]) == ("0.6.0", "gpustasis.io/gpu")
    (device,) = found["devices"]
    edits = device["containerEdits"]
    assert device["name"] == "all"
    assert f"GPUSTASIS_EMULATOR={emulator.path}" in edits["env"]
    places = {mount["containerPath"]: Path(mount["hostPath"]) for mount in edits["mounts"]}
    assert set(places) == {
        "/usr/lib/gpustasis-emulator/libcuda.so.1",
        "/usr/lib/gpustasis-emulator/libnvidia-ml.so.1",
        str(emulator.path.parent),
    }
    assert all(path.exists() for path in places.values())
    assert all(Path(node["path"]).is_char_device() for node in edits["deviceNodes"])


def test_it_is_written_whole(gpustasis: Run, tmp_path: Path) -> None:
    path = tmp_path / "cdi" / "gpustasis.json"
    assert gpustasis("emulator", "cdi", "--output", path).returncode == 0
    assert json.loads(path.read_text()) == json.loads(gpustasis("emulator", "cdi").stdout)
    assert [one.name for one in path.parent.iterdir()] == [path.name]
    (tmp_path / "file").write_text("")
    failed = gpustasis("emulator", "cdi", "--output", tmp_path / "file" / "y")
    assert failed.returncode == 15 and "cannot write" in failed.stderr


def test_there_has_to_be_an_emulator(
    gpustasis: Run, emulator_environ: dict[str, str], tmp_path: Path
) -> None:
    emulator_environ["GPUSTASIS_EMULATOR"] = str(tmp_path / "none")
    failed = gpustasis("emulator", "cdi")
    assert failed.returncode == 15 and "no emulator answers" in failed.stderr
