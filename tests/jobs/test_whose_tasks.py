# SPDX-License-Identifier: Apache-2.0
"""Which tasks a keeper stops, and which it leaves alone, when it is not sure of its job."""

from __future__ import annotations

import subprocess
import time
from contextlib import closing

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs.lives import Failure
from gpustasis.jobs.rank import Context
from jobs.test_stopping import lived, recovering
from jobs.test_undoing import at_the_gate, context, server, task  # noqa: F401 - fixtures
from support.job_ranks import state_of


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
