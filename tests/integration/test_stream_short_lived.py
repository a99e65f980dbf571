# SPDX-License-Identifier: Apache-2.0
"""Streams of jobs whose children come and go, with real CRIU: the end of one is no end of the job
while nobody was told to end it."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path

import pytest

from campaigns.rig import Rig
from gpustasis.errors import StreamError
from gpustasis.streaming.answers import Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import Kind
from support.criu_roots import criu_place
from support.job import Job
from support.streams import follow

WAIT_S = 20.0
LOOP = "while :; do {}; echo round; done"


@pytest.fixture(params=["/bin/sleep 0.1", "/bin/true"])
def job(request: pytest.FixtureRequest, newest_rig: Rig, tmp_path: Path) -> Iterator[Job]:
    words = ["/bin/sh", "-c", LOOP.format(request.param)]
    found = Job(words, tmp_path / "log", newest_rig.environ)
    try:
        found.wait_for("round", count=2)
        yield found
    finally:
        found.end()


def refuse(
    end: socket.socket, outcomes: list[Kind | None], act: Callable[[], None] = lambda: None
) -> None:
    """A receiver that takes all of a stream, and has received something else. What the sender says
    then is the outcome. act: is called while the tasks stand."""

    def at_end(replies: Replies, digest: bytes) -> None:
        time.sleep(0.5)  # the child that stands is to end at once when it runs on
        act()
        replies.tell(Kind.READY, digest="0" * 32)

    with closing(Descriptor(end.fileno(), "it", writing=False)) as source:
        outcomes.append(follow(source, at_end, WAIT_S)[1])


def send(
    rig: Rig, pid: int, spool: Path, act: Callable[[], None] = lambda: None
) -> tuple[str, list[Kind | None]]:
    """A stream to `refuse`: what the sender said, and the outcome; none: the stream broke off."""
    environ = dict(rig.environ) | {"GPUSTASIS_CRIU": criu_place(rig.criu)}
    words = [sys.executable, "-m", "gpustasis", "checkpoint", str(pid), "-o", "-"]
    near, far = socket.socketpair()
    outcomes: list[Kind | None] = []

    def receive() -> None:
        with suppress(StreamError):
            refuse(far, outcomes, act)

    with near, far:
        thread = threading.Thread(target=receive)
        thread.start()
        done = subprocess.run(
            [*words, "--spool", str(spool)],
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=near.fileno(),
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
        near.close()
        thread.join(WAIT_S)
    assert done.returncode == 18
    assert "has received something else than was sent" in done.stderr
    return done.stderr, outcomes


def test_a_child_that_ends_after_a_failure_is_no_end_of_the_job(
    newest_rig: Rig, job: Job, tmp_path: Path
) -> None:
    said, outcomes = send(newest_rig, job.pid, tmp_path / "spool")
    assert re.search(r"the job runs on: all \d+ of its processes are alive", said)
    assert outcomes == [Kind.ABANDONED], said
    assert os.listdir(tmp_path / "spool") == []
    job.wait_for("round", count=job.output().count("round") + 2)


def test_one_whose_memory_the_dump_had_taken_is_missed(newest_rig: Rig, tmp_path: Path) -> None:
    """Nobody knows whether it ended for want of it."""
    with newest_rig.job(mib=8, children=1) as job:
        (child,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
        said, outcomes = send(
            newest_rig, job.pid, tmp_path / "spool", lambda: os.kill(child, signal.SIGKILL)
        )
        assert f"the job may have ended: process {child} has ended" in said
        assert outcomes == []
        (kept,) = (tmp_path / "spool").iterdir()
        assert (kept / "inventory.img").exists()


def test_one_that_is_lost_in_a_dump_that_fails_is_missed(newest_rig: Rig, tmp_path: Path) -> None:
    """The driver kills it before its memory is stored."""
    environ = dict(newest_rig.environ) | {"GPUSTASIS_CRIU": criu_place(newest_rig.criu)}
    with newest_rig.job(mib=8, children=1) as job:
        (child,) = map(int, Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split())
        newest_rig.emulator.add_fault("checkpoint", "die", pid=child)
        words = [sys.executable, "-m", "gpustasis", "checkpoint", str(job.pid)]
        done = subprocess.run(
            [*words, "-o", tmp_path / "stream", "--spool", tmp_path / "spool"],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert done.returncode == 12, done.stderr
        said = f"it cannot be said that the job runs on: process {child} has ended in the dump"
        assert said in done.stderr
        (kept,) = (tmp_path / "spool").iterdir()
        assert str(kept) in done.stderr and not (tmp_path / "stream").exists()
        job.run_on(without=[child])
