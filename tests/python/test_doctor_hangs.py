# SPDX-License-Identifier: Apache-2.0
"""`gpustasis doctor` where the driver or NVML does not answer: it ends, and says which call."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpustasis.answering import ANSWER_S
from support.checkpoint import Checkpointer
from support.criu_roots import preferred_criu
from support.job import Job

PROGRAM = Path(__file__).resolve().parent.parent / "programs" / "hanging_gpu.c"
ENDS_S = 100  # of a call of the command, with each question that has no answer
NO_ANSWER = f"no answer within {ANSWER_S:g} s"
Findings = dict[str, dict[str, Any]]


@pytest.fixture
def environ(
    compile_c: Callable[..., Path], emulator_environ: dict[str, str], tmp_path: Path
) -> dict[str, str]:
    library = compile_c(PROGRAM, "-shared", "-fPIC")
    config = tmp_path / "config.toml"
    config.write_text(f'driver = "{library}"\nnvml = "{library}"\n')
    return emulator_environ | {"GPUSTASIS_CONFIG": str(config)}


Ask = Callable[..., Findings]


@pytest.fixture
def doctor(environ: dict[str, str]) -> Ask:
    """doctor(hangs, *words) -> the findings by name."""

    def call(hangs: str, *words: str | Path) -> Findings:
        ended = subprocess.run(
            [sys.executable, "-m", "gpustasis", "doctor", "--json", *words],
            env=environ | {"HANGS": hangs},
            capture_output=True,
            text=True,
            timeout=ENDS_S,
            check=False,
        )
        assert ended.stdout, ended.stderr
        return {item["name"]: item for item in json.loads(ended.stdout)["findings"]}

    return call


def test_the_host_with_a_driver_that_answers(doctor: Ask) -> None:
    """What the other tests stand on."""
    found = doctor("")
    assert found["NVML"]["text"] == "driver 580.95.05"
    assert found["GPU 0"]["text"].startswith("a GPU")


@pytest.mark.parametrize("call", ["cuDeviceGetCount", "cuDriverGetVersion"])
def test_the_host(doctor: Ask, call: str) -> None:
    found = doctor(f"{call} nvmlInit_v2")
    assert found["NVML"]["status"] == "note"
    assert found["NVML"]["text"] == f"NVML: {NO_ANSWER}"
    assert found["CUDA driver"]["status"] == "problem"
    assert NO_ANSWER in found["CUDA driver"]["text"]
    assert "pidfd_open" in found


# argv: the library and a pid; prints the findings. That process is in no container.
CHECKER = """
import json, sys
from dataclasses import asdict
from gpustasis.diagnosis import container_checks
from gpustasis.diagnosis.container import Container
library, pid = sys.argv[1], int(sys.argv[2])
container = Container(name="x", init=pid, tasks=(pid,), group="/", config=None)
found = container_checks.check(container, library, library)
print(json.dumps({finding.name: asdict(finding) for finding in found}))
"""


@pytest.fixture
def check(
    compile_c: Callable[..., Path], environ: dict[str, str], launch: Callable[..., Job]
) -> Ask:
    job = launch([Path("/bin/sleep"), "1000"])

    def call(hangs: str) -> Findings:
        library = compile_c(PROGRAM, "-shared", "-fPIC")
        ended = subprocess.run(
            [sys.executable, "-c", CHECKER, library, str(job.pid)],
            env=environ | {"HANGS": hangs},
            capture_output=True,
            text=True,
            timeout=ENDS_S,
            check=True,
        )
        found: Findings = json.loads(ended.stdout)
        return found

    return call


def test_a_container_whose_users_are_not_known(check: Ask) -> None:
    found = check("cuCheckpointProcessGetRestoreThreadId")
    assert found["GPU processes"]["status"] == "problem"
    assert NO_ANSWER in found["GPU processes"]["text"]
    assert "driver state" not in found


def test_a_container_where_the_gpus_cannot_be_listed(check: Ask) -> None:
    found = check("cuDeviceGetCount nvmlInit_v2")
    assert found["driver state"]["status"] == "ok"
    assert found["memory"]["status"] == "note"
    assert NO_ANSWER in found["memory"]["text"]


@pytest.fixture
def checkpoint(
    gpu_generations: Callable[..., Job], emulator_environ: dict[str, str], images: Path
) -> Path:
    Checkpointer(preferred_criu(), emulator_environ).dump(gpu_generations(), images)
    return images


def test_a_checkpoint(doctor: Ask, checkpoint: Path) -> None:
    for call in ("cuDriverGetVersion", "cuDeviceGetCount"):
        found = doctor(call, "--archive", checkpoint)
        assert found["CUDA driver"]["status"] == "problem", call
        assert NO_ANSWER in found["CUDA driver"]["text"], call
    found = doctor("cuInit", "--archive", checkpoint)
    assert found["CUDA driver"]["text"] == "cuInit: no answer within 30 s"


def test_a_checkpoint_and_memory_in_use_that_is_not_known(doctor: Ask, checkpoint: Path) -> None:
    found = doctor("nvmlInit_v2", "--archive", checkpoint)
    assert found["CUDA driver"]["status"] == "ok"
    assert found["GPU memory"]["status"] == "note"
    assert (
        f"there on 1 GPU(s); how much of it is in use is not known: NVML: {NO_ANSWER}"
        in (found["GPU memory"]["text"])
    )
