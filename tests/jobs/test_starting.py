# SPDX-License-Identifier: Apache-2.0
"""What an earlier start of a job that is recovered has left does not end, or begin, another one."""

from __future__ import annotations

import json
import subprocess
from contextlib import closing
from dataclasses import replace

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import epochs, verified
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.lives import Failure, Life, Stage, Way, life_of
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.store import Put
from gpustasis.jobs.verified import Mark
from jobs.test_stopping import TERMS, committed, recovering
from jobs.test_undoing import context, server, task  # noqa: F401 - fixtures

FAILURE = Failure(rank=0, reason="why", at=1.0)


def stored(context: Context, life: Life) -> Life:  # noqa: F811
    context.store.write([], [Put(context.keys.life, life.to_text())])
    return find_life(context.store, context.keys)


def elsewhere(context: Context) -> Guard:  # noqa: F811
    other = replace(where(context.place.run), host="b", boot="b", machine="", run="elsewhere")
    words = context.store, context.keys, 0, 1, TERMS, other
    return Guard(*words, ttl_s=4, told=lambda _: None)


def test_a_checkpoint_that_ended_an_earlier_start_does_not_end_this_one(
    context: Context,  # noqa: F811
) -> None:
    """Its keepers had left it open."""
    guard, rank = recovering(context)
    with closing(rank):
        assert not rank.begin(new=True, can_start=True, newest=True)
        assert not rank.ended_by(7)
        assert guard.read().stage is Stage.STOPS
        stored(context, replace(guard.life, run="another", stage=Stage.RUNS))
        assert rank.ended_by(7)  # nor the one that was begun meanwhile
        assert guard.read().stage is Stage.RUNS
        assert guard.standing(guard.life.number) is None


def test_a_job_that_a_checkpoint_has_ended_has_not_ended_by_itself(
    context: Context,  # noqa: F811
) -> None:
    _, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        assert rank.ended_by(7)
    _, standby = recovering(context)
    with closing(standby):
        assert not standby.begin(new=False, can_start=True)
        assert standby.take(None).done
        assert not standby.ended_well
        stored(context, replace(find_life(context.store, context.keys), failure=None))
        assert standby.take(None).done
        assert standby.ended_well


@pytest.mark.parametrize("stage", [Stage.STOPS, Stage.FAILED])
def test_nobody_says_that_a_rank_has_stopped_that_may_run_elsewhere(
    stage: Stage,
    context: Context,  # noqa: F811
) -> None:
    """In the life before, which was given up there."""
    other = elsewhere(context)
    with closing(other):
        life = other.begin(new=True)
        assert other.say(1, Way.HERE)
    stored(context, replace(life.failed(FAILURE), number=2, stage=stage, begun=1))
    guard, rank = recovering(context)
    with closing(rank):
        rank.begin(new=False, can_start=True)
        if stage is Stage.STOPS:
            with pytest.raises(JobError, match="rank 0 was on b in life 1"):
                rank.take(None)
        else:
            assert rank.take(None).failed
        assert guard.standing(2) is None


@pytest.mark.parametrize("how", ["stops", "lives", "had ended well"])
def test_a_keeper_that_was_told_to_end_restores_nothing(
    how: str,
    context: Context,  # noqa: F811
    task: subprocess.Popen[bytes],  # noqa: F811
) -> None:
    guard, rank = recovering(context)
    with closing(rank):
        assert rank.begin(new=True, can_start=True)
        if how == "lives":
            context.note(pid=task.pid)
        rank.asked = "it was told to end"
        if how == "had ended well":
            rank.take(0)  # upon the signal
            assert rank.asked == ""
        stored(context, guard.read().failed(FAILURE))
        rank.take(0)
        life = guard.read()
        assert (life.stage, life.why()) == (Stage.FAILED, "rank 0: it was told to end")


def test_a_verdict_clears_only_what_verdicts_have_marked(context: Context) -> None:  # noqa: F811
    store, keys, number = context.store, context.keys, committed(context)

    def verdict(wrong: str) -> Mark:
        plan = Plan(world=1, leave_running=True, restores=number)
        restore = epochs.begin(store, keys, plan)
        verified._store(store, keys, restore, number, wrong)
        assert epochs.abort(store, keys, restore, "done").phase is Phase.ABORTED
        return verified.marks(store, keys, [number]).get(number, Mark())

    assert verdict("it is not back").by_verdict
    assert verdict("").why == ""
    hung = Mark("it hung as soon as it was restored")
    store.write([], [verified.put_mark(keys, number, hung)])
    assert verdict("") == hung
    again = verdict("it is not back")
    assert (again.times, again.is_sure, again.by_verdict) == (2, True, False)
    assert verdict("") == again


def test_a_life_of_an_earlier_build_is_read(context: Context) -> None:  # noqa: F811
    guard, rank = recovering(context)
    with closing(rank):
        rank.begin(new=True, can_start=True)
        entry = context.store.read(context.keys.life).entries[context.keys.life]
        value = json.loads(entry.value)
        del value["ended"]
        assert life_of("key", replace(entry, value=json.dumps(value))) == guard.life
