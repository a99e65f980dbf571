# SPDX-License-Identifier: Apache-2.0
"""A driver, or a process, that does not answer holds no keeper up."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from gpustasis.answering import TimedOutError
from gpustasis.driver import Driver, ProcessState
from gpustasis.jobs import checkpointing, clock, cuda, evidence, preempting
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.lives import Failure, Life, Stage, Terms
from gpustasis.jobs.rank import Context
from gpustasis.jobs.work import Order
from gpustasis.task import is_of_ipc_job
from jobs.test_undoing import context, server, task  # noqa: F401 - fixtures
from support.job_ranks import wait_for


class Deaf:
    """A driver that does not answer about process 7 before `hears` is set."""

    def __init__(self) -> None:
        self.hears = threading.Event()
        self.states = {7: ProcessState.RUNNING, 8: ProcessState.LOCKED}

    def get_state(self, pid: int) -> ProcessState:
        """As Driver.get_state."""
        self._answer(pid)
        return self.states[pid]

    def lock(self, pid: int, _: int) -> None:
        """As Driver.lock."""
        self._answer(pid)
        self.states[pid] = ProcessState.LOCKED

    def unlock(self, pid: int) -> None:
        """As Driver.unlock."""
        self._answer(pid)
        self.states[pid] = ProcessState.RUNNING

    def _answer(self, pid: int) -> None:
        if pid == 7:
            assert self.hears.wait(60)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    deaf = Deaf()
    monkeypatch.setattr(cuda, "ANSWER_S", 2.0)
    monkeypatch.setattr(cuda, "load_driver", lambda: deaf)
    monkeypatch.setattr(cuda, "_using", list)
    yield deaf
    deaf.hears.set()


LIFE = Life(run="r", number=3, stage=Stage.LOOKS, world=1, terms=Terms(restarts=1))
FAILED = replace(LIFE, failure=Failure(rank=0, reason="it hangs \ud800", at=1.0, hung=True))


def py_spy(directory: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program = directory / "py-spy"
    program.write_text(f"#!/bin/sh\n{text}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{directory}:{os.environ['PATH']}")


@pytest.fixture
def two(context: Context) -> Iterator[tuple[int, int]]:  # noqa: F811
    """The rank's tasks, a root and its child."""
    words = ["sh", "-c", "sleep 1000 & wait"]
    with subprocess.Popen(words, start_new_session=True) as root:
        place = Path(f"/proc/{root.pid}/task/{root.pid}/children")
        wait_for(lambda: bool(place.read_text().split()), "the child")
        context.note(pid=root.pid)
        yield root.pid, int(place.read_text())
        os.killpg(root.pid, signal.SIGKILL)


def test_a_process_of_which_py_spy_shows_nothing_in_time_hides_no_other(
    context: Context,  # noqa: F811
    two: tuple[int, int],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root, child = two
    py_spy(tmp_path, f'[ "$3" = {root} ] && exec sleep 100; echo shown', monkeypatch)
    monkeypatch.setattr(evidence, "_PY_SPY_S", 5.0)
    evidence.keep_stacks(context, FAILED)
    place = evidence.place_of(context.place.directory, 3)
    assert (place / "reason").read_text() == "it hangs \\ud800\n"
    found = {path.name for path in place.iterdir()} - {"reason"}
    assert found == {f"{root}.proc", f"{child}.proc", f"{child}.py-spy"}


def test_a_process_that_hangs_in_the_kernel_is_not_waited_for(
    context: Context,  # noqa: F811
    two: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Reading its command line may never end."""
    over = threading.Event()
    monkeypatch.setattr(evidence, "ALL_S", 0.3)
    monkeypatch.setattr(evidence, "_of_proc", lambda _: str(over.wait(60)))
    begin = time.monotonic()
    evidence.keep_stacks(context, FAILED)
    assert time.monotonic() - begin < 30
    assert "it took longer than 0.3 s" in caplog.text
    over.set()


def test_a_process_that_does_not_answer_is_named_and_the_others_are_unlocked(driver: Any) -> None:
    assert cuda.unlock_cuda([7, 8]) == ["GetState on process 7: no answer within 2 s"]
    assert driver.states[8] is ProcessState.RUNNING
    with pytest.raises(TimedOutError, match="GetState on process 7"):
        cuda.state_of(cast("Driver", driver), 7)


def test_what_is_locked_after_nobody_waits_for_it_is_unlocked_again(driver: Any) -> None:
    with pytest.raises(TimedOutError, match="Lock on process 7"):
        cuda.lock_cuda(cast("Driver", driver), 7, 1)
    seen: list[ProcessState] = []
    unlock = driver.unlock
    driver.unlock = lambda pid: (seen.append(driver.states[pid]), unlock(pid))
    driver.hears.set()
    wait_for(lambda: driver.states[7] is ProcessState.RUNNING and bool(seen), "the unlock")
    assert seen == [ProcessState.LOCKED]


def test_tasks_are_told_to_end_in_time_whoever_does_not_answer(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The store, NVML or /proc."""
    over = threading.Event()
    context.note(pid=task.pid)
    monkeypatch.setattr(preempting, "_memory_of", lambda _: int(over.wait(60)))
    said: list[str] = []
    asked: list[object] = []  # what who asks from outside is told
    grace = preempting.Grace(grace_s=0.6, reserve_s=0.2)
    keeper = preempting.Preempting(context, grace, said.append, lambda **one: asked.append(one))
    keeper.listens()
    assert keeper.told_to_end()
    try:
        assert task.wait(30) == -signal.SIGTERM
    finally:
        over.set()
    assert said[0].endswith("it was not known in time whether there is one")
    assert not keeper.told_to_end()
    ready = {"preemptible": True, "listens": True}
    assert asked == [ready, {**ready, "gave_up": True, "because": keeper.because}]
    assert said[0].endswith(keeper.because)


def test_a_keeper_that_prunes_for_ever_is_not_waited_for(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(clock, "_LOCK_S", 0.3)
    context.options = replace(context.options, keep_last=1)
    said: list[str] = []
    with (context.place.run.parent / "prune").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        clock.remove_older(context, said.append)
    assert "older checkpoints stay: another keeper of this host holds " in said[0]


@pytest.mark.parametrize("is_ipc", [False, True])
def test_all_cuda_processes_of_a_rank_are_locked_at_once_but_those_of_cuda_ipc(
    is_ipc: bool,
    context: Context,  # noqa: F811
    two: tuple[int, int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One may wait for another on its GPU; of a job of CUDA IPC the driver writes to one file."""
    meeting = threading.Barrier(2)
    under_way: list[int] = []

    def lock(_: object, pid: int, *, timeout_ms: int) -> None:
        assert timeout_ms > 0
        under_way.append(pid)
        if is_ipc:
            assert under_way == [pid]
            time.sleep(0.2)
        else:
            meeting.wait(30)
        under_way.remove(pid)

    monkeypatch.setattr(checkpointing, "cuda_processes", lambda _: list(two))
    monkeypatch.setattr(checkpointing, "load_driver", lambda: None)
    monkeypatch.setattr(checkpointing, "lock_cuda", lock)
    monkeypatch.setattr(checkpointing, "is_of_ipc_job", lambda pid: is_ipc and pid == two[1])
    Checkpointing(context, Order(7, leave_running=True, restores=0)).lock_cuda()
    assert not under_way


@pytest.mark.parametrize("name", ["CUDA_CHECKPOINT_JOB_FILE", "NOT_CUDA_CHECKPOINT_JOB_FILE"])
def test_who_is_of_a_job_of_cuda_ipc_says_so_in_its_environment(name: str) -> None:
    words, both = ["sh", "-c", "echo; read x"], subprocess.PIPE
    environ = {"A": "B", name: "/x"}
    with subprocess.Popen(words, env=environ, stdin=both, stdout=both) as process:
        # Popen returns while the kernel still loads the program, which has no environment by then.
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert is_of_ipc_job(process.pid) == (not name.startswith("NOT"))
        process.kill()
    assert not is_of_ipc_job(process.pid)
