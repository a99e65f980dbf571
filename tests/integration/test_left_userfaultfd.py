# SPDX-License-Identifier: Apache-2.0
"""CRIU dumps no process with a userfaultfd. One that a killed tracker has left is closed first, any
other is let alone."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from campaigns.rig import Rig
from campaigns.steady_job import SteadyJob
from support.broken_trackers import break_off, record_of, userfaultfds
from support.job import POLL_S, TIMEOUT_S, Job

CompileC = Callable[..., Path]

_FORK = """
import os, signal
signal.signal(signal.SIGUSR1, lambda *_: os.fork())
print("ready", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("cuda", [1, 0], ids=["gpu", "cpu"])
def test_what_a_killed_tracker_has_left_is_closed(rig: Rig, compile_c: CompileC, cuda: int) -> None:
    with rig.job(mib=8, cuda=cuda, plain_threads=2) as job:
        break_off(compile_c, job.pid, "made")
        assert len(userfaultfds(job.pid)) == 1
        if not cuda:
            assert rig.dump(job, rig.images(), "--leave-running", plugin=False).status != 0
            assert len(userfaultfds(job.pid)) == 1
        dumped = rig.dump(job, rig.images(), "--leave-running")
        assert dumped.status == 0, dumped.errors
        assert "which was killed has left there" in dumped.log
        assert userfaultfds(job.pid) == []
        assert not record_of(job.pid).exists()
        job.run_on()
        break_off(compile_c, job.pid, "made")
        images = rig.images()
        dumped = rig.dump(job, images)
        assert dumped.status == 0, dumped.errors
        job.wait()
        restored = rig.restore(images, "--restore-detached")
        assert restored.status == 0, restored.errors
        job.run_on()


def test_it_is_closed_in_children_that_have_it_as_well(
    newest_rig: Rig, compile_c: CompileC
) -> None:
    program = [sys.executable, "-I", "-S", "-c", _FORK]
    job = Job(program, newest_rig.scratch / "job.log", newest_rig.environ)
    try:
        job.wait_for("ready")
        break_off(compile_c, job.pid, "made")
        job.signal(signal.SIGUSR1)
        listed = Path(f"/proc/{job.pid}/task/{job.pid}/children")
        deadline = time.monotonic() + TIMEOUT_S
        while not (children := listed.read_text().split()):
            assert time.monotonic() < deadline, "it has forked no child"
            time.sleep(POLL_S)
        tree = [job.pid, *map(int, children)]
        assert [len(userfaultfds(pid)) for pid in tree] == [1, 1]
        images = newest_rig.images()
        words = newest_rig.dump_words(job, images, ["--leave-running"])  # type: ignore[arg-type]
        dumped = newest_rig.run(words, images, "dump")
        assert dumped.status == 0, dumped.errors
        assert [userfaultfds(pid) for pid in tree] == [[], []]
        assert all(Path(f"/proc/{pid}").exists() for pid in tree)
    finally:
        job.end()


def require_let_alone(rig: Rig, job: SteadyJob, own: list[int]) -> str:
    """The log of a dump that fails because of these descriptors, and closes none of them."""
    dumped = rig.dump(job, rig.images(), "--leave-running")
    assert dumped.status != 0
    assert "closed descriptor" not in dumped.log
    assert userfaultfds(job.pid) == own
    job.run_on()
    return dumped.log


@pytest.mark.parametrize("cuda", [1, 0], ids=["gpu", "cpu"])
def test_an_application_keeps_its_own(newest_rig: Rig, compile_c: CompileC, cuda: int) -> None:
    with newest_rig.job(mib=8, cuda=cuda) as job:
        break_off(compile_c, job.pid, "made")
        record = record_of(job.pid)
        record.unlink()  # from here on it is as one of its own
        own = userfaultfds(job.pid)
        assert len(own) == 1
        require_let_alone(newest_rig, job, own)
        record.write_text("a tracker that was killed before it made one\n")
        written = record.stat().st_mtime_ns - 3600 * 10**9
        os.utime(record, ns=(written, written))
        require_let_alone(newest_rig, job, own)
        assert not record.exists()


def test_nothing_is_closed_while_its_maker_lives(newest_rig: Rig, compile_c: CompileC) -> None:
    with newest_rig.job(mib=8) as job:
        break_off(compile_c, job.pid, "made")
        own = userfaultfds(job.pid)
        with record_of(job.pid).open("r+") as record:
            fcntl.flock(record, fcntl.LOCK_EX)  # as its writer does for as long as it lives
            log = require_let_alone(newest_rig, job, own)
            assert "another process is making one there" in log
        dumped = newest_rig.dump(job, newest_rig.images(), "--leave-running")
        assert dumped.status == 0, dumped.errors
        assert userfaultfds(job.pid) == []
        job.run_on()
