# SPDX-License-Identifier: Apache-2.0
"""gpustasis.driver against the emulated driver, in a process of its own: a driver that was loaded
and initialised leaves threads and descriptors behind that the test run must not have."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from gpustasis.answering import TimedOutError, answer_within
from gpustasis.driver import Driver, ProcessState
from gpustasis.emulator import Emulator
from gpustasis.errors import DriverError
from support.job import Job

Generations = Callable[..., Job]
Call = Callable[..., Any]

# argv: pid, then the calls as JSON [name, arguments]; prints what each returned or raised.
CALLER = """
import json, sys
from gpustasis.driver import Driver
from gpustasis.errors import DriverError
driver, answers = Driver(), []
for name, *arguments in json.loads(sys.argv[1]):
    try:
        answers.append(getattr(driver, name)(*arguments))
    except DriverError as exc:
        answers.append({"code": exc.code, "text": str(exc)})
print(json.dumps(answers, default=lambda device: [device.name, device.uuid, device.memory_size]))
"""


@pytest.fixture
def call(emulator_environ: dict[str, str]) -> Call:
    """call([name, arguments...], ...) -> what each of these methods of one Driver answered."""

    def run(*calls: list[Any]) -> Any:
        ended = subprocess.run(
            [sys.executable, "-c", CALLER, json.dumps(calls)],
            env=emulator_environ,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return json.loads(ended.stdout)

    return run


def test_a_missing_library_is_named() -> None:
    with pytest.raises(DriverError, match=r"libno-such-driver\.so\.1") as caught:
        Driver("libno-such-driver.so.1")
    assert caught.value.code is None


def test_a_library_without_the_calls_is_no_driver() -> None:
    driver = Driver("libc.so.6")
    assert not driver.has_checkpoint_api()
    with pytest.raises(DriverError, match="570 or newer"):
        driver.get_state(1)


def test_it_tells_version_and_devices(call: Call, emulator: Emulator) -> None:
    version, has_api, _, devices = call(["version"], ["has_checkpoint_api"], ["init"], ["devices"])
    assert version == emulator.status()["api_version"]
    assert has_api is True
    wanted = [[gpu["uuid"], gpu["memory_bytes"]] for gpu in emulator.status()["gpus"]]
    assert [[uuid, size] for _, uuid, size in devices] == wanted
    assert all("emulat" in name.lower() for name, _, _ in devices)


def test_a_process_goes_round_all_states(call: Call, gpu_generations: Generations) -> None:
    job = gpu_generations()
    answers = call(
        ["get_state", job.pid],
        ["lock", job.pid, 5000],
        ["get_state", job.pid],
        ["checkpoint", job.pid],
        ["get_state", job.pid],
        ["init"],
        ["restore", job.pid],
        ["get_state", job.pid],
        ["unlock", job.pid],
        ["get_state", job.pid],
    )
    assert answers[0::2] == [
        ProcessState.RUNNING,
        ProcessState.LOCKED,
        ProcessState.CHECKPOINTED,
        None,
        None,
    ]
    assert (answers[7], answers[9]) == (ProcessState.LOCKED, ProcessState.RUNNING)


def test_the_restore_thread_is_one_of_the_process(call: Call, gpu_generations: Generations) -> None:
    job = gpu_generations()
    (tid,) = call(["get_restore_thread_id", job.pid])
    with open(f"/proc/{job.pid}/task/{tid}/comm") as comm:
        assert comm.read().startswith("cuda")


def test_a_refusal_has_code_name_and_pid(call: Call, gpu_generations: Generations) -> None:
    job = gpu_generations()
    (refused,) = call(["unlock", job.pid])
    assert refused["code"] == 401
    assert "CUDA_ERROR_ILLEGAL_STATE" in refused["text"]
    assert f"Unlock on process {job.pid}" in refused["text"]


def test_a_process_without_cuda_is_not_initialised(call: Call, launch: Callable[..., Job]) -> None:
    job = launch(["/bin/sleep", "60"])
    (refused,) = call(["get_state", job.pid])
    assert "CUDA_ERROR_NOT_INITIALIZED" in refused["text"]


@pytest.mark.parametrize("timeout_ms", [0, -1, 2**32])
def test_a_lock_without_an_end_is_a_mistake(timeout_ms: int) -> None:
    with pytest.raises(ValueError, match="timeout_ms"):
        Driver("libc.so.6").lock(1, timeout_ms)


def test_who_only_looks_gets_what_the_call_gives() -> None:
    error = ValueError("a value")
    assert answer_within(60, "it", lambda: 7) == 7
    assert answer_within(60, "it", lambda: error) is error


@pytest.mark.parametrize("error", [DriverError("refused"), ValueError("odd"), OSError(5, "EIO")])
def test_who_only_looks_gets_what_the_call_raises(
    error: Exception, capfd: pytest.CaptureFixture[str]
) -> None:
    """At once, and Python prints nothing of it."""

    def call() -> None:
        raise error

    begin = time.monotonic()
    with pytest.raises(type(error)) as caught:
        answer_within(60, "it", call)
    assert time.monotonic() - begin < 30
    assert caught.value is error
    assert capfd.readouterr() == ("", "")


def test_who_only_looks_does_not_wait_for_a_call_that_hangs() -> None:
    goes_on = threading.Event()
    try:
        with pytest.raises(TimedOutError, match=r"^it: no answer within 0\.1 s$"):
            answer_within(0.1, "it", goes_on.wait)
    finally:
        goes_on.set()
