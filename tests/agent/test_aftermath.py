# SPDX-License-Identifier: Apache-2.0
"""What an agent says of a checkpoint of a process that the one before it was at."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

import gpustasis
from gpustasis.agent.aftermath import settle
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import Operation, State
from gpustasis.agent.subjects import Subject, held
from gpustasis.agent.work import Work
from gpustasis.errors import AgentError, CheckpointError, ImageError
from gpustasis.task import read_task
from support.criu_roots import newest_criu
from support.job import Job

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


def test_one_that_cannot_be_read_now_is_not_done_and_stays(
    begun: Operation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        try:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        except OSError as exc:
            raise ImageError(str(exc)) from exc

    monkeypatch.setattr("gpustasis.image.pack.open_pack", fail)
    found = settled(begun, verify=True)
    assert found.state is State.INTERRUPTED and "is whole cannot be told" in found.note, found
    assert gpustasis.open(begun.place).inspect()


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


def test_an_agent_that_stops_leaves_it_to_the_next(begun: Operation) -> None:
    settle(begun, config(verify=False), lambda: True)
    assert begun.state is State.RUNNING and not begun.ended
    assert "the agent was stopped" in begun.note
