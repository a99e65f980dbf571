# SPDX-License-Identifier: Apache-2.0
"""Which tasks a keeper stops, and which it leaves alone, when it is not sure of its job."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import closing, suppress

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import verified
from gpustasis.jobs.lives import Failure
from gpustasis.jobs.rank import Context
from jobs.test_stopping import lived, recovering
from jobs.test_undoing import (  # noqa: F401 - fixtures
    at_the_gate,
    context,
    server,
    supervisor_of,
    task,
)
from support.job_ranks import state_of, wait_for


@pytest.mark.parametrize(
    ("life", "said"),
    [(5, "the store has lost what it held"), (0, "was started without --restarts")],
)
def test_tasks_of_no_life_that_the_store_knows_are_left_alone(
    life: int,
    said: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    lived(context)
    context.life = life
    context.note(pid=task.pid)
    _, rank = recovering(context)
    with closing(rank), pytest.raises(JobError, match=said):
        rank.begin(new=True, can_start=True)
    assert task.poll() is None


def test_tasks_that_a_criu_holds_are_not_stopped(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    """It would restore them, or let them run, whatever has become of their job."""
    context.life = 1
    context.note(pid=task.pid)
    guard, rank = recovering(context)
    with closing(rank), at_the_gate(context):
        rank.begin(new=True, can_start=True)
        guard.report(1, "why", unnoticed_s=0.0)
        with pytest.raises(JobError, match="a criu still waits for a decision"):
            rank.take(None)
        assert task.poll() is None


# The root of a rank, whose keeper has died, and a worker in a session of its own, as torchrun's.
# What the root leaves behind comes to its parent here, and not to a keeper.
TAKEN_OVER = """
import ctypes, subprocess, sys
ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)
script = "setsid sleep 1000 & echo $!; wait"
root = subprocess.Popen(["sh", "-c", script], stdout=subprocess.PIPE, start_new_session=True)
print(root.pid, int(root.stdout.readline()), flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("is_another", [False, True])
@pytest.mark.parametrize("root_is_dead", [False, True])
def test_what_a_root_that_was_taken_over_leaves_behind_is_ended_too(
    root_is_dead: bool,
    is_another: bool,
    context: Context,  # noqa: F811
) -> None:
    """Else it would run beside what is restored. A later process of its number is left alone."""
    words = [sys.executable, "-c", TAKEN_OVER]
    pipe = subprocess.PIPE
    with subprocess.Popen(words, stdin=pipe, stdout=pipe, text=True) as parent:
        assert parent.stdout is not None
        root, worker = map(int, parent.stdout.readline().split())
        try:
            wait_for(lambda: os.getsid(worker) == worker, "the worker's session")
            context.note(pid=root)
            supervisor = supervisor_of(context)

            def is_known() -> bool:
                assert not supervisor._has_ended()
                return worker in context.kin.known

            wait_for(is_known, "a look that finds the worker")
            if is_another:
                context.kin._known[worker] -= 1
            if root_is_dead:
                os.kill(root, signal.SIGKILL)
                wait_for(lambda: not context.state.lives, "the root's end")
            verified.end_tasks(context)
            is_left = is_another and root_is_dead
            assert (state_of(worker) in {"Z", ""}) == (not is_left)
            context.note(pid=0)
            assert not context.kin.known
        finally:
            with suppress(ProcessLookupError):
                os.kill(worker, signal.SIGKILL)
            parent.communicate()


@pytest.mark.parametrize("why", ["its tasks here are stopped", "was started anew meanwhile"])
def test_tasks_whose_keeper_is_not_the_ranks_any_more_are_stopped(
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
    why: str,
) -> None:
    context.life = 1
    context.note(pid=task.pid)
    guard, rank = recovering(context)
    with closing(rank):
        rank.begin(new=True, can_start=True)
        if why == "was started anew meanwhile":
            rank._run = "of the job before"
        else:
            guard.unseated = "rank 0 has a keeper elsewhere"
        assert rank.is_due(ended=False, waits=False)
        with pytest.raises(JobError, match=why):
            rank.take(None)
    assert state_of(task.pid) in {"Z", ""}


def test_a_keeper_that_is_told_to_end_takes_part_in_a_restore_first(context: Context) -> None:  # noqa: F811
    """Else all ranks would wait for it."""
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        rank.asked = "it was told to end"
        assert rank.is_due(ended=True, waits=False)
        life = guard.read()
        failure = Failure(rank=0, reason="why", at=time.time())
        assert guard.replace(life, life.failed(failure).restoring(epoch=1, checkpoint=1))
        assert not rank.is_due(ended=True, waits=False)
