# SPDX-License-Identifier: Apache-2.0
"""One suite for everything that calls the driver: the Python Driver, the plugin's library in its
own process, and the plugin's worker. All of them on the emulator, each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis.driver import ProcessState
from gpustasis.emulator import Emulator
from support.job import Job

Calls = Callable[..., list[str]]
# The same lines as of tests/cpp/plugin/driver_calls.cpp.
CALLER = """
import json, sys
from gpustasis.driver import NOT_INITIALIZED, Driver
from gpustasis.errors import DriverError
driver = Driver()
names = {"state": "get_state", "restore_thread": "get_restore_thread_id"}
for name, *numbers in json.loads(sys.argv[1]):
    try:
        answer = getattr(driver, names.get(name, name))(*numbers)
        print("ok" if answer is None else f"ok {int(answer)}")
    except DriverError as exc:
        # That there is no such thread is an answer to the plugin, and an error to Python.
        absent = name == "restore_thread" and exc.code == NOT_INITIALIZED
        print("ok" if absent else f"refused {exc.code} {exc}")
"""


@pytest.fixture(params=["python", "library", "worker"])
def calls(
    request: pytest.FixtureRequest, emulator_environ: dict[str, str], repository: Path
) -> Calls:
    """calls((name, number...), ...) -> a line for each, by one Driver."""

    def run(*wanted: tuple[str | int, ...]) -> list[str]:
        if request.param == "python":
            words = [sys.executable, "-c", CALLER, json.dumps(wanted)]
        else:
            libraries = Path(emulator_environ["LD_LIBRARY_PATH"].split(":")[0])
            program = repository / "build/cmake/tests/cpp/plugin/driver_calls"
            words = [str(program), request.param]
            words += [str(libraries / "libcuda.so.1"), str(libraries / "libnvidia-ml.so.1")]
            words += [":".join(map(str, call)) for call in wanted]
        ended = subprocess.run(
            words, env=emulator_environ, capture_output=True, text=True, timeout=60, check=False
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.splitlines()

    return run


def state(which: ProcessState) -> str:
    return f"ok {which.value}"


def test_the_version_is_the_driver_s(calls: Calls, emulator: Emulator) -> None:
    assert calls(("version",)) == [f"ok {emulator.status()['api_version']}"]


def test_a_process_goes_round_all_states(calls: Calls, gpu_generations: Callable[..., Job]) -> None:
    job = gpu_generations()
    pid = job.pid
    answers = calls(
        *(("init",), ("state", pid), ("lock", pid, 5000), ("state", pid)),
        *(("checkpoint", pid), ("state", pid), ("restore", pid), ("state", pid)),
        *(("unlock", pid), ("state", pid)),
    )
    assert answers[0::2] == ["ok"] * 5
    assert answers[1::2] == [
        state(each)
        for each in (
            ProcessState.RUNNING,
            ProcessState.LOCKED,
            ProcessState.CHECKPOINTED,
            ProcessState.LOCKED,
            ProcessState.RUNNING,
        )
    ]
    before = job.output().count("intact")
    job.signal(10)  # SIGUSR1: compare all memory
    job.wait_for("intact", count=before + 1)


def test_the_restore_thread_is_one_of_the_process(
    calls: Calls, gpu_generations: Callable[..., Job]
) -> None:
    job = gpu_generations()
    (answer,) = calls(("restore_thread", job.pid))
    tid = int(answer.removeprefix("ok "))
    assert Path(f"/proc/{job.pid}/task/{tid}/comm").read_text().startswith("cuda")


def test_a_process_without_cuda_has_none(calls: Calls, launch: Callable[..., Job]) -> None:
    job = launch(["/bin/sleep", "60"])
    thread, refused = calls(("restore_thread", job.pid), ("state", job.pid))
    assert thread == "ok"
    assert refused.startswith("refused 3 ")  # CUDA_ERROR_NOT_INITIALIZED


@pytest.mark.parametrize("call", ["restore_thread", "state", "unlock"])
def test_of_a_process_that_has_ended_the_driver_says_so(calls: Calls, call: str) -> None:
    with subprocess.Popen(["/bin/true"]) as ended:
        pass
    (refused,) = calls((call, ended.pid))
    assert refused.startswith("refused 304 ")  # CUDA_ERROR_OPERATING_SYSTEM


@pytest.mark.parametrize("name", ["unlock", "checkpoint", "restore"])
def test_a_refusal_has_code_name_and_pid_and_changes_nothing(
    calls: Calls, gpu_generations: Callable[..., Job], name: str
) -> None:
    job = gpu_generations()
    _, refused, now = calls(("init",), (name, job.pid), ("state", job.pid))
    assert refused.startswith("refused 401 ")
    assert "CUDA_ERROR_ILLEGAL_STATE" in refused
    assert str(job.pid) in refused
    assert now == state(ProcessState.RUNNING)


@pytest.mark.parametrize(("call", "code"), [("lock", 999), ("checkpoint", 999)])
def test_a_failure_of_the_driver_is_told_as_it_is(
    calls: Calls,
    gpu_generations: Callable[..., Job],
    emulator: Emulator,
    call: str,
    code: int,
) -> None:
    job = gpu_generations()
    emulator.add_fault(call, "error", code=code)
    wanted = [("lock", job.pid, 5000), ("checkpoint", job.pid)][: 1 if call == "lock" else 2]
    assert calls(*wanted)[-1].startswith(f"refused {code} ")
