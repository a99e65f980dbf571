# SPDX-License-Identifier: Apache-2.0
"""A tracker that is killed while the process makes a userfaultfd for it leaves that open. The next
one closes it, and nothing else."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from gpustasis._core import DirtyTracker, UnsupportedDataError
from support.broken_trackers import (
    TIMEOUT_S,
    break_off,
    record_of,
    stopped,
    tracker_words,
    userfaultfds,
)
from support.dirty_target import Target, running

CompileC = Callable[..., Path]

OWN_PIDS = ("unshare", "--pid", "--fork", "--mount-proc")
# Records of what this runs are not those of the others: as another user's, or a container's.
OWN_RUN = ("unshare", "--mount", "sh", "-ec", 'mount -t tmpfs tmpfs /run; exec "$@"', "sh")


@pytest.fixture(scope="session")
def program(compile_c: CompileC, repository: Path) -> Path:
    return compile_c(repository / "tests/programs/dirty_target.c")


def attach(target: Target) -> None:
    DirtyTracker(target.pid, "write-protect").close()


def test_the_next_tracker_closes_it(program: Path, compile_c: CompileC) -> None:
    with running(program) as target:
        before = target.ask("fds")
        for _ in range(3):
            break_off(compile_c, target.pid, "made")
            assert len(userfaultfds(target.pid)) == 1
            assert record_of(target.pid).exists()
            attach(target)
            assert target.ask("fds") == before
            assert not record_of(target.pid).exists()


@pytest.mark.parametrize("last", ["made", "begun"])
def test_many_that_are_killed_leave_one_at_most(
    program: Path, compile_c: CompileC, last: str
) -> None:
    with running(program) as target:
        before = target.ask("fds")
        for where in ("made", "begun", "made", "made", last):
            break_off(compile_c, target.pid, where)
            assert len(userfaultfds(target.pid)) == (1 if where == "made" else 0)
        attach(target)
        assert target.ask("fds") == before


def test_a_tracker_that_lives_keeps_what_it_makes(program: Path, compile_c: CompileC) -> None:
    with running(program) as target:
        target.ask("thread")
        before = target.ask("fds")
        with stopped(compile_c, target.pid, "made") as tracker:
            (made,) = userfaultfds(target.pid)
            attach(target)  # by the other thread
            assert userfaultfds(target.pid) == [made]
            tracker.send_signal(signal.SIGCONT)
            assert tracker.wait(TIMEOUT_S) == 0
        assert target.ask("fds") == before
        with stopped(compile_c, target.pid, "made") as tracker:
            attach(target)
            tracker.kill()
            tracker.wait()
            assert len(userfaultfds(target.pid)) == 1
        attach(target)
        assert target.ask("fds") == before


def test_a_tracker_that_finds_no_thread_closes_nothing(program: Path, compile_c: CompileC) -> None:
    with running(program) as target:
        before = target.ask("fds")
        with stopped(compile_c, target.pid, "made") as tracker:
            with pytest.raises(UnsupportedDataError, match="is traced by process"):
                attach(target)
            assert len(userfaultfds(target.pid)) == 1
            tracker.send_signal(signal.SIGCONT)
            assert tracker.wait(TIMEOUT_S) == 0
        assert target.ask("fds") == before


def test_a_tracker_outside_of_the_pid_namespace_keeps_what_it_makes(
    program: Path, compile_c: CompileC
) -> None:
    """One inside sees neither it nor its record, and has the record of one that was killed."""
    with running(program, OWN_PIDS) as target:
        target.ask("thread")
        before = target.ask("fds")
        children = Path(f"/proc/{target.pid}/task/{target.pid}/children")
        pid = int(children.read_text())
        break_off(compile_c, pid, "begun")
        with stopped(compile_c, pid, "made", OWN_RUN) as tracker:
            (made,) = userfaultfds(pid)
            time = os.stat(f"/proc/{pid}/fd/{made}").st_ctime_ns
            os.utime(record_of(pid), ns=(time, time))
            inside = ["nsenter", "--target", str(pid), "--pid", "--mount"]
            subprocess.run([*inside, *tracker_words(1)], timeout=TIMEOUT_S, check=True)
            assert userfaultfds(pid) == [made]
            tracker.send_signal(signal.SIGCONT)
            assert tracker.wait(TIMEOUT_S) == 0
        assert target.ask("fds") == before


def test_an_application_keeps_its_own(program: Path, compile_c: CompileC) -> None:
    with running(program) as target:
        target.ask("userfaultfd")
        (own,) = userfaultfds(target.pid)
        attach(target)
        for _ in range(3):
            break_off(compile_c, target.pid, "made")
            assert len(userfaultfds(target.pid)) == 2
            attach(target)
            assert userfaultfds(target.pid) == [own]


def test_an_application_keeps_what_it_makes_after_a_killed_tracker(
    program: Path, compile_c: CompileC
) -> None:
    with running(program) as target:
        break_off(compile_c, target.pid, "begun")
        record = record_of(target.pid)
        written = record.stat().st_mtime_ns - 10 * 10**9  # s ago
        os.utime(record, ns=(written, written))
        target.ask("userfaultfd")
        own = userfaultfds(target.pid)
        attach(target)
        assert userfaultfds(target.pid) == own
        assert not record.exists()
    with running(program) as target:
        break_off(compile_c, target.pid, "made")
        target.ask("userfaultfd")  # too soon for anybody to tell which is which
        both = userfaultfds(target.pid)
        assert len(both) == 2
        attach(target)
        assert userfaultfds(target.pid) == both
