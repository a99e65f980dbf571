# SPDX-License-Identifier: Apache-2.0
"""Restored tasks that a start of the job takes over, before the verdict on their restore."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import pytest

from gpustasis.cli import job_run
from gpustasis.errors import JobError, VerificationError
from gpustasis.jobs import verified
from gpustasis.jobs.kept import numbers_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan
from gpustasis.jobs.supervise import Supervisor
from gpustasis.verifying import Check
from jobs.test_stopping import committed, lived, recovering
from jobs.test_undoing import (  # noqa: F401 - fixtures
    SETTINGS,
    context,
    decided,
    server,
    task,
)
from support.job_ranks import state_of

WORDS = ("sh", "-c", "exit 3")


@contextmanager
def told_to_end(context: Context) -> Iterator[None]:  # noqa: F811
    """The keeper, as soon as it says that it waits; or when it should have long."""
    is_over = threading.Event()

    def tell() -> None:
        end = time.monotonic() + 10
        while time.monotonic() < end and not is_over.is_set():
            if any(numbers_of(context.store, context.keys, "waiting", context.world)):
                break
            time.sleep(0.1)
        if not is_over.is_set():
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, lambda *_: None)  # also if the keeper has ended by then
    thread = threading.Thread(target=tell)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def brought_back(context: Context, task: subprocess.Popen[bytes], wrong: str) -> int:  # noqa: F811
    """The epoch of two ranks that has, which this one has not settled. wrong: its verdict."""
    committed(context)
    restored = committed(context)
    context.world = 2
    plan = Plan(world=2, leave_running=True, restores=restored)
    number = decided(context, plan, Phase.COMMITTED)
    context.note(pid=task.pid, epoch=number, images=str(context.place.images(restored)))
    verified._store(context.store, context.keys, number, restored, wrong)
    return number


@pytest.mark.parametrize("older", [True, False])
def test_a_start_that_takes_tasks_over_heeds_the_verdict_on_their_restore(
    older: bool,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """All or none: the other ranks' tasks were killed, and wait for the next restore."""
    number = brought_back(context, task, "rank 1 is not back: why")
    check = Check(words=("true",), seconds=60)
    context.options = replace(context.options, check=check, older=older)
    told: list[str] = []
    supervisor = Supervisor(context, SETTINGS, told.append)
    words = supervisor, context, WORDS, False, True, None
    with told_to_end(context):
        if older:
            ended = job_run._keep(*words)
            assert (ended.status, ended.told) == (128 + signal.SIGTERM, True)
        else:
            with pytest.raises(VerificationError, match="rank 1 is not back: why"):
                job_run._keep(*words)
    assert state_of(task.pid) in {"Z", ""}
    assert context.state.epoch == 0
    assert not older or any("its tasks were killed; waits for an older" in one for one in told)
    waiting = numbers_of(context.store, context.keys, "waiting", 2)
    assert waiting == [number if older else 0, 0]


def test_a_start_that_takes_verified_tasks_over_lets_them_run(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    brought_back(context, task, "")
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    supervisor = Supervisor(context, SETTINGS, print)
    assert supervisor.settle()
    threading.Timer(1.0, task.terminate).start()
    assert supervisor.run(restoring=False).status == 128 + signal.SIGTERM
    assert context.state.epoch == 0


def test_a_start_that_meets_tasks_which_were_restored_leaves_the_verdict_to_the_next_keeper(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    number = brought_back(context, task, "rank 1 is not back: why")
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    with pytest.raises(JobError, match="runs already"):
        Supervisor(context, SETTINGS, print).start(WORDS, os.environ)
    assert context.state.epoch == number
    with pytest.raises(VerificationError, match="rank 1 is not back: why"):
        Supervisor(context, SETTINGS, print).run(restoring=False)
    assert state_of(task.pid) in {"Z", ""}


def test_a_start_of_a_recovered_job_waits_for_no_verdict_on_tasks_that_it_has_stopped(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They are of an earlier life, whose ranks may never say how they were."""
    lived(context)
    context.life = 1
    number = brought_back(context, task, "rank 1 is not back: why")
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    guard, rank = recovering(context)
    with closing(guard):
        supervisor = Supervisor(context, SETTINGS, print, None, rank)
        assert supervisor.settle()
        rank.begin(new=True, can_start=False)
        assert (context.state.pid, context.state.epoch) == (0, number)
        monkeypatch.setattr(verified, "await_verdict", lambda *_, **__: pytest.fail("it waits"))
        supervisor._verify_left(lambda: False)
