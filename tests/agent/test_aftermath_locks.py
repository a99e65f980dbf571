# SPDX-License-Identifier: Apache-2.0
"""What an agent does with processes that are locked, or were, when it looks what became of a dump
that the one before it was at."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import MANIFEST_NAME
from gpustasis.agent.aftermath import settle
from gpustasis.agent.config import Config, Target
from gpustasis.agent.left_logs import dump_has_begun
from gpustasis.agent.operations import Operation, State, from_json
from gpustasis.agent.subjects import Subject
from gpustasis.agent.work import Work
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.statistics import statistics_path
from gpustasis.driver import Driver, ProcessState
from gpustasis.task import read_task
from support.checkpoint import Checkpointer
from support.driver_states import driver_of
from support.job import Job, check_memory

CONFIG = Config(targets=(Target(name="train", pidfile=Path("/x")),))


def settled(operation: Operation) -> Operation:
    settle(operation, CONFIG, lambda: False)
    assert operation.ended
    return operation


@pytest.fixture
def driver(emulator_environ: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Of the emulator, which the agent and what it starts ask as well."""
    for name, value in emulator_environ.items():
        monkeypatch.setenv(name, value)
    found = driver_of(emulator_environ)
    monkeypatch.setattr("gpustasis.agent.work.load_driver", lambda: found)
    return found


def broken_off(images: Path) -> None:
    """As if criu had been killed before it wrote the last of it."""
    for path in (images / INVENTORY_NAME, statistics_path(images, "dump")):
        path.unlink()


def at_work(job: Job, place: Path) -> Operation:
    """A dump of it that nobody is at any more."""
    subject = Subject(pid=job.pid, start_time=read_task(job.pid).start_time)
    return Operation(
        subject=subject, uid=0, target="train", state=State.RUNNING, place=str(place), began=1.0
    )


@pytest.mark.parametrize("dump", ["ended", "none"])
def test_a_lock_that_is_not_the_dump_s_stays(
    checkpointer: Checkpointer,
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    dump: str,
) -> None:
    """Another program has locked the process: after a dump that ended, or before one that came to
    nothing."""
    job = gpu_generations()
    if dump == "ended":
        checkpointer.dump(job, images, leave_running=True)
    driver.lock(job.pid, 30_000)
    try:
        found = settled(at_work(job, images))
        assert driver.get_state(job.pid) is ProcessState.LOCKED
    finally:
        driver.unlock(job.pid)
    assert found.state is (State.DONE if dump == "ended" else State.INTERRUPTED)
    said = f"process {job.pid} is locked, and nothing says that this dump has left it so"
    assert said in found.note and f"gpustasis recover {job.pid}" in found.note
    check_memory(job, 0)


@pytest.mark.parametrize("before", [ProcessState.LOCKED, ProcessState.RUNNING])
def test_what_a_dump_has_found_locked_stays_so_and_the_rest_runs_on(
    checkpointer: Checkpointer,
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    before: ProcessState,
) -> None:
    """The dump was broken off when its manifest was written, and no record is left."""
    job = gpu_generations()
    was_locked = before is ProcessState.LOCKED
    if was_locked:
        driver.lock(job.pid, 30_000)
    checkpointer.dump(job, images, leave_running=True, plugin={"found_locked": "dump"})
    broken_off(images)
    assert (images / MANIFEST_NAME).exists()
    if not was_locked:
        driver.lock(job.pid, 30_000)
    found = settled(at_work(job, images))
    assert found.state is State.INTERRUPTED
    assert ("as the dump found it" if was_locked else "was locked, and runs again") in found.note
    assert driver.get_state(job.pid) is before
    if was_locked:
        driver.unlock(job.pid)
    check_memory(job, 0)


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where this process, as an agent, has private directories made: one that it has left."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    found = tmp_path / "temporary/gpustasis-0123abcd"
    found.mkdir(mode=0o700, parents=True)
    return found


def leave_log(place: Path, pid: int, name: str = " comm: job") -> Path:
    path = place / "dump.log"
    path.touch(mode=0o600)
    path.write_text(f"(00.0001) Version: 4.3\n(00.0642) Dumping processes (pid: {pid}{name})\n")
    return path


@pytest.mark.parametrize("is_same", [True, False])
def test_what_ran_when_a_dump_began_that_came_to_nothing_runs_on(
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    temporary: Path,
    is_same: bool,
) -> None:
    """All were killed at once, and no record is left: the agent has written down who ran. Another
    process may have got the pid since."""
    job = gpu_generations()
    operation = at_work(job, images)
    Work(operation, CONFIG, None)._note_running(job.pid)
    assert operation.running == [(job.pid, read_task(job.pid).start_time)]
    assert from_json(json.loads(json.dumps(operation.as_record()))).running == operation.running
    assert "running" not in operation.as_json()
    leave_log(temporary, job.pid)
    if not is_same:
        operation.running = [(job.pid, operation.running[0][1] + 1)]
    driver.lock(job.pid, 30_000)
    found = settled(operation)
    state = driver.get_state(job.pid)
    assert state is (ProcessState.RUNNING if is_same else ProcessState.LOCKED)
    assert ("was locked, and runs again" in found.note) == is_same, found.note
    if not is_same:
        driver.unlock(job.pid)
    check_memory(job, 0)


@pytest.mark.parametrize("left", ["nothing", "an older log", "of another tree", "a file"])
def test_who_was_locked_without_the_dump_stays_so(
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    temporary: Path,
    left: str,
) -> None:
    """The agent was killed before it started criu, and somebody has locked the process since. What
    is in the image directory is of a dump that has begun."""
    job = gpu_generations()
    operation = at_work(job, images)
    Work(operation, CONFIG, None)._note_running(job.pid)
    images.mkdir(exist_ok=True)
    if left == "an older log":
        leave_log(temporary, job.pid)
        operation.began = time.time() + 60.0
    elif left == "of another tree":
        leave_log(temporary, job.pid * 10)
    elif left == "a file":
        (images / "gpustasis-arena").touch()
    driver.lock(job.pid, 30_000)
    note = settled(operation).note
    if left == "a file":
        assert driver.get_state(job.pid) is ProcessState.RUNNING
    else:
        assert driver.get_state(job.pid) is ProcessState.LOCKED
        assert f"process {job.pid} is locked, and nothing says that this dump has left" in note
        driver.unlock(job.pid)
    check_memory(job, 0)


def test_logs_that_say_that_a_dump_has_begun(temporary: Path) -> None:
    log = leave_log(temporary, 7, name="")  # as before CRIU 4.1
    now = log.stat().st_mtime
    assert dump_has_begun(7, now) and not dump_has_begun(77, now) and not dump_has_begun(7, now + 9)
    log.chmod(0o622)
    assert not dump_has_begun(7, now)
    log.rename(temporary / "elsewhere")
    log.symlink_to("elsewhere")
    assert not dump_has_begun(7, now)


def test_criu_says_that_it_dumps_before_the_plugin_locks(
    checkpointer: Checkpointer, gpu_generations: Callable[..., Job], images: Path, temporary: Path
) -> None:
    """Each of them, in a log that is there meanwhile."""
    job, seen = gpu_generations(), list[bool]()

    def look(line: str) -> None:
        if f"locked pid {job.pid}" in line:
            seen.append(dump_has_begun(job.pid, before))

    before = time.time()
    checkpointer.dump(job, images, leave_running=True, on_line=look)
    assert seen == [True]
    text = (images / "dump.log").read_text()
    assert text.index("Dumping processes (pid: ") < text.index("cuda_plugin: ")
    assert not dump_has_begun(job.pid, before)  # it has ended


def test_who_does_not_answer_keeps_nobody_from_being_written_down(
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Nor is the dump held up for longer than all of them may take."""
    silent, job, late = gpu_generations(), gpu_generations(), gpu_generations()
    pids = (silent.pid, job.pid, late.pid)
    monkeypatch.setattr("gpustasis.agent.work.tree_pids", lambda _: pids)
    asked, ask, goes_on = list[int](), driver.get_state, threading.Event()

    def answer(pid: int) -> ProcessState:
        asked.append(pid)
        if pid == silent.pid:
            goes_on.wait(60.0)
        return ask(pid)

    monkeypatch.setattr(driver, "get_state", answer)
    operation = at_work(job, images)
    Work(operation, CONFIG, None)._note_running(job.pid)
    assert [pid for pid, _ in operation.running] == [job.pid, late.pid]
    assert f"may stay locked: {silent.pid}\n" in caplog.text
    caplog.clear()
    asked.clear()
    monkeypatch.setattr("gpustasis.agent.work._ASK_S", 2.0)
    Work(operation, CONFIG, None)._note_running(job.pid)
    assert asked == [silent.pid] and operation.running == []
    assert f"may stay locked: {silent.pid} {job.pid} {late.pid}\n" in caplog.text
    goes_on.set()


def test_what_is_locked_when_a_dump_begins_is_not_written_down(
    gpu_generations: Callable[..., Job], driver: Driver, images: Path
) -> None:
    job = gpu_generations()
    driver.lock(job.pid, 30_000)
    operation = at_work(job, images)
    Work(operation, CONFIG, None)._note_running(job.pid)
    driver.unlock(job.pid)
    assert operation.running == []


def test_who_is_stopped_is_not_asked(
    gpu_generations: Callable[..., Job], driver: Driver, images: Path
) -> None:
    """The driver would not answer, and the plugin refuses it."""
    job = gpu_generations()
    os.kill(job.pid, signal.SIGSTOP)
    try:
        job.await_stopped()
        operation, before = at_work(job, images), set(threading.enumerate())
        begin = time.monotonic()
        Work(operation, CONFIG, None)._note_running(job.pid)
        assert time.monotonic() - begin < 5.0 and set(threading.enumerate()) <= before
        assert operation.running == []
    finally:
        os.kill(job.pid, signal.SIGCONT)
    check_memory(job, 0)


def test_one_that_runs_needs_no_command(
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tree may have many processes, and each command takes its time."""
    monkeypatch.setattr("gpustasis.process.run", lambda *_, **__: pytest.fail("it was run"))
    job = gpu_generations()
    found = settled(at_work(job, images))
    assert found.note == f"there is no whole checkpoint; process {job.pid} runs"


def test_one_deadline_is_for_all_of_an_operation(
    gpu_generations: Callable[..., Job],
    driver: Driver,
    images: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("gpustasis.agent.aftermath._RECOVER_S", 0.0)
    monkeypatch.setattr("gpustasis.agent.aftermath.needs_recovery", lambda _: True)
    monkeypatch.setattr("gpustasis.process.run", lambda *_, **__: pytest.fail("it was run"))
    assert "are over; run `gpustasis recover" in settled(at_work(gpu_generations(), images)).note
