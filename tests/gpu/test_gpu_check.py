# SPDX-License-Identifier: Apache-2.0
"""ci/gpu-check itself, on the driver emulator: the script works, and says no more than it saw."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
from rich.console import Console

from gpustasis.errors import CriuError
from gpustasis_bench.demo.training import Result
from gpustasis_bench.gpucheck import checkpoints, steps
from gpustasis_bench.gpucheck.behaviour import PARTS, memories
from gpustasis_bench.gpucheck.checkpoints import Checkpoints
from gpustasis_bench.gpucheck.steps import Given, GpuCheck
from gpustasis_bench.machine import Machine


def run_gpu_check(
    repository: Path, out: Path, *options: str, **environ: str
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [repository / "ci/gpu-check", "--emulator", "--out", out, *options],
        env=os.environ | {"PYTHON": sys.executable} | environ,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


def verdicts(out: Path) -> dict[str, dict[str, Any]]:
    record = json.loads((out / "gpu-check.json").read_text())
    assert record["backend"] == "emulator"
    return {step["step"]: step for step in record["steps"]}


@pytest.mark.timeout(420)
def test_every_step_passes_or_says_why_it_cannot(repository: Path, tmp_path: Path) -> None:
    ended = run_gpu_check(repository, tmp_path)
    found = verdicts(tmp_path)
    failed = {step: one["reason"] for step, one in found.items() if one["verdict"] == "failed"}
    assert not failed
    assert ended.returncode == 0, ended.stdout + ended.stderr
    steps = ("driver", "trace", "behaviour", "criu", "C program", "checkpoints")
    assert [found[step]["verdict"] for step in steps] == ["passed"] * 6
    assert found["PyTorch"]["verdict"] == "not possible here"
    assert found["PyTorch"]["reason"]
    assert "EMULATOR" in ended.stdout
    assert json.loads((tmp_path / "trace.json").read_text())["backend"] == "emulator"
    behaviour = json.loads((tmp_path / "behaviour.json").read_text())
    assert behaviour["backend"] == "emulator"
    assert {part: behaviour[part].get("error") for part in PARTS} == dict.fromkeys(PARTS)
    said = dict(memories(behaviour))
    assert {where.split(",")[0] for where in said} == {*PARTS}
    assert {where: one for where, one in said.items() if not one.startswith("intact ")} == {}
    assert len(behaviour["round trips"]["trips"]) == 10
    made = json.loads((tmp_path / "checkpoints.json").read_text())
    assert made["backend"] == "emulator"
    assert len(made["left running"]["restores"]) == len(made["two processes"]) == 2
    assert "was checkpointed, and runs again" in made["killed dumps"][-1]["recover"]
    report = json.loads((tmp_path / "demo.json").read_text())
    assert report["backend"] == "emulator"
    assert report["restored_bit_exact"] is True
    assert report["stored_bytes"] < report["gpu_bytes"]


@pytest.mark.timeout(120)
def test_a_failed_step_is_named_and_the_exit_code_tells(repository: Path, tmp_path: Path) -> None:
    ended = run_gpu_check(
        repository,
        tmp_path / "out",
        *("--step", "criu", "--step", "C program"),
        GPUSTASIS_PLUGIN_DIR=str(tmp_path),
    )
    assert ended.returncode == 1, ended.stdout + ended.stderr
    assert verdicts(tmp_path / "out")["C program"]["verdict"] == "failed"
    assert "cuda_plugin.so is missing" in verdicts(tmp_path / "out")["C program"]["reason"]


def test_without_a_gpu_it_refuses_to_check_one(repository: Path, tmp_path: Path) -> None:
    program = [
        sys.executable,
        "-m",
        "gpustasis_bench.gpucheck",
        "--programs",
        tmp_path,
        "--out",
        tmp_path,
    ]
    if Path("/proc/driver/nvidia/version").exists():
        pytest.skip("this machine has an NVIDIA driver; the test is for those without")
    ended = subprocess.run(program, capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 20
    assert "no GPU on this machine" in ended.stderr


@pytest.mark.parametrize(
    "said", ["intact 8 bytes", "the target did not look at it", "wrong at 0x8"]
)
def test_memory_that_is_wrong_fails_the_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    def fill(record: dict[str, Any], *_: object, **__: object) -> None:
        record["two at once"] = {"memory": ["intact 8 bytes", said], "error": "a part's"}

    class Caller:
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def load(self) -> dict[str, int]:
            return {"version": 13000}

        def driver_version(self) -> str:
            return "580"

        def persistence_mode(self) -> bool:
            return True

    monkeypatch.setattr(steps, "fill_behaviour", fill)
    monkeypatch.setattr(steps, "Caller", Caller)
    given = Given(programs=tmp_path, out=tmp_path, criu=None, torch_python=None, seconds=1)
    check = GpuCheck(Machine(gpu="one", emulated=True), given, Console(quiet=True))
    is_wrong = said.startswith("wrong")
    assert check.run(["behaviour"]) is not is_wrong
    assert (f"two at once, memory, 2: {said}" in check.findings[0].reason) is is_wrong


@pytest.mark.parametrize(
    "said", ["PID runs: there was nothing to do", "the run had ended by itself", "was checkpointed"]
)
def test_a_dump_that_is_over_was_not_killed_while_it_wrote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    run = SimpleNamespace(pid=1, await_mark=lambda: None, kill=lambda: None)
    monkeypatch.setattr(Checkpoints, "_start", lambda *_: run)
    monkeypatch.setattr(Checkpoints, "_killed", lambda *_: {"recover": said})
    monkeypatch.setattr(checkpoints, "dump", lambda *_: SimpleNamespace(seconds=1.0))
    made: Any = Checkpoints
    check = made(None, None, tmp_path, Result(raw={"steps": 3}))
    if said == "was checkpointed":
        assert len(check.killed_dumps()) == 6
    else:
        with pytest.raises(CriuError, match="could be killed while it wrote"):
            check.killed_dumps()
