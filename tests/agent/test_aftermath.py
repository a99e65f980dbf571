# SPDX-License-Identifier: Apache-2.0
"""What an agent says of a checkpoint of a process that the one before it was at."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import gpustasis
from gpustasis._core import MANIFEST_NAME
from gpustasis.agent.aftermath import settle
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import Operation, State, from_json
from gpustasis.agent.subjects import Subject, held
from gpustasis.agent.work import Work
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.statistics import statistics_path
from gpustasis.driver import Driver, ProcessState
from gpustasis.errors import AgentError, CheckpointError
from gpustasis.task import read_task
from support.checkpoint import Checkpointer
from support.criu_roots import newest_criu
from support.driver_states import driver_of
from support.job import Job, check_memory

SLEEP = "print('ready', flush=True)\nwhile True: __import__('time').sleep(0.1)"


@pytest.fixture
def begun(launch: Callable[..., Job], tmp_path: Path) -> Operation:
    """Its criu has ended, and all is there."""
    job, place, criu = launch([sys.executable, "-c", SLEEP]), tmp_path / "images", newest_criu()
    job.wait_for("ready")
    program = str(criu.root or criu.program)
    gpustasis.checkpoint(job.pid, place, leave_running=True, layout="packed", criu=program)
    subject = Subject(pid=job.pid, start_time=read_task(job.pid).start_time)
    return Operation(
        subject=subject, uid=0, target="train", state=State.RUNNING, place=str(place), began=1.0
    )


def config(*, verify: bool) -> Config:
    return Config(targets=(Target(name="train", pidfile=Path("/x"), verify=verify),))


def settled(operation: Operation, *, verify: bool = False) -> Operation:
    settle(operation, config(verify=verify), lambda: False)
    assert operation.ended
    return operation


def damage(images: Path) -> None:
    pack = images / "gpustasis-files.img"
    with pack.open("r+b") as file:
        file.seek(pack.stat().st_size // 2)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("verify", [False, True])
def test_a_whole_one_of_a_process_that_runs_is_done(begun: Operation, verify: bool) -> None:
    assert settled(begun, verify=verify).state is State.DONE, begun


def test_a_damaged_one_is_not_done_where_it_is_to_be_verified(begun: Operation) -> None:
    damage(Path(begun.place))
    found = settled(begun, verify=True)
    assert found.state is State.INTERRUPTED and "is damaged" in found.note, found
    assert not Path(begun.place).exists()


@pytest.mark.parametrize("boot", [True, False])
def test_one_of_a_process_that_is_another_by_now_is_not_done(begun: Operation, boot: bool) -> None:
    """Whatever had its pid may be what was dumped."""
    if boot:
        begun.boot = "0" * 32
    else:
        begun.subject = Subject(pid=begun.subject.pid, start_time=begun.subject.start_time - 1)
    found = settled(begun)
    assert found.state is State.INTERRUPTED and "cannot be told" in found.note, found


def test_one_that_was_to_end_its_job_is_done_when_that_has_ended(begun: Operation) -> None:
    begun.stop = True
    begun.subject = Subject(pid=begun.subject.pid, start_time=begun.subject.start_time - 1)
    assert settled(begun).state is State.DONE


def test_a_user_s_tree_is_looked_at_again_after_its_dump(
    begun: Operation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of another user may have joined it meanwhile: its memory is not this user's to have."""
    criu = newest_criu()
    told: list[int] = []

    def joined(root: int, uid: int) -> None:
        told.append(root)
        if len(told) > 1:
            raise AgentError("process 7 of its tree is of user 0")

    monkeypatch.setattr("gpustasis.agent.work.require_all_of", joined)
    again = Operation(subject=begun.subject, uid=12345)
    bounds = Config(store=tmp_path / "store", criu=str(criu.root or criu.program))
    with held(begun.subject.pid, begun.subject.start_time) as process:
        work = Work(again, bounds, None, process)
        work.prepare()
        with pytest.raises(AgentError, match=r"while it was dumped: process 7 .*; it was removed"):
            work.run()
    assert told == [begun.subject.pid] * 2 and not Path(again.place).exists()


LEFT = """
import os, signal, sys
os.setpgid(0, 0)
child = os.fork()
if child == 0:
    open("/proc/self/comm", "w").write("criu")
    images = os.open(sys.argv[1], os.O_RDONLY)
    os.kill(os.getpid(), signal.SIGSTOP)
    os._exit(0)
os.waitpid(child, os.WUNTRACED)
print(child, flush=True)
signal.pause()
"""


@pytest.mark.parametrize("parent_is_killed", [True, False])
def test_what_a_killed_criu_has_left_stopped_is_not_waited_for(
    begun: Operation, monkeypatch: pytest.MonkeyPatch, parent_is_killed: bool
) -> None:
    """CRIU's own helper: nobody would ever continue it. One whose criu lives is at work."""
    monkeypatch.setattr("gpustasis.agent.aftermath.PATIENCE_S", 1.0)
    words = [sys.executable, "-c", LEFT, begun.place, "dump"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as criu:
        assert criu.stdout is not None
        child = int(criu.stdout.readline())
        if parent_is_killed:
            criu.kill()
            criu.wait()
        try:
            settle(begun, config(verify=False), lambda: False)
            assert (begun.state is State.DONE) == parent_is_killed, begun
            assert begun.note.startswith("criu is still at work") == (not parent_is_killed)
            with suppress(CheckpointError):
                assert (read_task(child).state == "T") == (not parent_is_killed)
        finally:
            for pid in (child, criu.pid):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


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
    driver.lock(job.pid, 1000)
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
        driver.lock(job.pid, 1000)
    checkpointer.dump(job, images, leave_running=True, plugin={"found_locked": "dump"})
    broken_off(images)
    assert (images / MANIFEST_NAME).exists()
    if not was_locked:
        driver.lock(job.pid, 1000)
    found = settled(at_work(job, images))
    assert found.state is State.INTERRUPTED
    assert ("as the dump found it" if was_locked else "was locked, and runs again") in found.note
    assert driver.get_state(job.pid) is before
    if was_locked:
        driver.unlock(job.pid)
    check_memory(job, 0)


@pytest.mark.parametrize("is_same", [True, False])
def test_what_ran_when_a_dump_began_that_came_to_nothing_runs_on(
    gpu_generations: Callable[..., Job], driver: Driver, images: Path, is_same: bool
) -> None:
    """All were killed at once, and no record is left: the agent has written down who ran. Another
    process may have got the pid since."""
    job = gpu_generations()
    operation = at_work(job, images)
    Work(operation, config(verify=False), None)._note_running(job.pid)
    assert operation.running == [(job.pid, read_task(job.pid).start_time)]
    assert from_json(json.loads(json.dumps(operation.as_record()))).running == operation.running
    assert "running" not in operation.as_json()
    if not is_same:
        operation.running = [(job.pid, operation.running[0][1] + 1)]
    driver.lock(job.pid, 1000)
    found = settled(operation)
    state = driver.get_state(job.pid)
    assert state is (ProcessState.RUNNING if is_same else ProcessState.LOCKED)
    assert ("was locked, and runs again" in found.note) == is_same, found.note
    if not is_same:
        driver.unlock(job.pid)
    check_memory(job, 0)


def test_what_is_locked_when_a_dump_begins_is_not_written_down(
    gpu_generations: Callable[..., Job], driver: Driver, images: Path
) -> None:
    job = gpu_generations()
    driver.lock(job.pid, 1000)
    operation = at_work(job, images)
    Work(operation, config(verify=False), None)._note_running(job.pid)
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
        operation, before = at_work(job, images), threading.active_count()
        begin = time.monotonic()
        Work(operation, config(verify=False), None)._note_running(job.pid)
        assert time.monotonic() - begin < 5.0 and threading.active_count() == before
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


def test_an_agent_that_stops_leaves_it_to_the_next(begun: Operation) -> None:
    settle(begun, config(verify=False), lambda: True)
    assert begun.state is State.RUNNING and not begun.ended
    assert "the agent was stopped" in begun.note
