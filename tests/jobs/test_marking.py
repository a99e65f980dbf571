# SPDX-License-Identifier: Apache-2.0
"""Which checkpoints are marked when a job ends for good, and by what follows its start."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

import pytest

from gpustasis.jobs import choosing, epochs, verified
from gpustasis.jobs.guard import Guard, where
from gpustasis.jobs.leading import Leading
from gpustasis.jobs.lives import (
    Recovery,
    Stage,
    Standing,
    Terms,
    Way,
    recovery_text,
    standing_text,
)
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, phase_text, settled_text
from gpustasis.jobs.steering import all_recoveries, find_life, give_up
from gpustasis.jobs.store import Answer, Put, Require, Unreachable
from gpustasis.jobs.verified import Mark
from jobs.test_choosing import ENDED, HUNG, marks
from jobs.test_stopping import committed, stopped
from jobs.test_undoing import context, server  # noqa: F401 - fixtures


def back(context: Context, at: float, restored: int) -> Put:  # noqa: F811
    """The job ran again at this time, in life 2."""
    recovery = Recovery(
        life=1,
        rank=0,
        reason="why",
        at=at,
        unnoticed_s=0.0,
        seconds=0.0,
        epoch=9,
        restored=restored,
    )
    return Put(context.keys.recovery(1), recovery_text(recovery))


def test_a_job_that_hangs_when_no_restart_is_left_marks_for_its_next_start(
    context: Context,  # noqa: F811
) -> None:
    """As soon as it is known which checkpoints there are."""
    store, keys, now = context.store, context.keys, time.time()
    committed(context, now - 300)
    late = committed(context, now - 10)
    stopped(context, HUNG, begun=99)
    hung = replace(find_life(store, keys), stage=Stage.RUNS).failed(replace(HUNG, at=now))
    assert hung.stage is Stage.FAILED
    store.write([], [Put(keys.life, hung.to_text())])
    lead = Leading(store, keys, 4, print)
    under_way = epochs.begin(store, keys, Plan(world=1, leave_running=True))
    lead.turn(find_life(store, keys))
    assert marks(context) == {}
    epochs.abort(store, keys, under_way, "it is over")
    lead.turn(find_life(store, keys))
    assert set(marks(context)) == {late}


def test_whoever_leads_marks_before_it_ends(
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It has failed the job for good itself, and stops what it has: nothing else waits for that."""
    monkeypatch.setattr(Guard, "_serve", lambda _: None)
    place = where(context.place.run)
    words = context.store, context.keys, 0, 1, Terms(restarts=0), place
    guard = Guard(*words, ttl_s=4, told=print)
    with closing(guard):
        guard.begin(new=True)
        late = committed(context, time.time() - 10)
        guard.report(1, "why", unnoticed_s=20.0, hung=True)
        assert guard.life.stage is Stage.FAILED
    assert set(marks(context)) == {late}


def test_what_hangs_as_soon_as_a_start_has_restored_it_is_marked(
    context: Context,  # noqa: F811
) -> None:
    """Nothing had failed before that start, and it counts as no recovery."""
    store, keys = context.store, context.keys
    older, newest = committed(context), committed(context)
    stopped(context, replace(ENDED, at=time.time()))
    lead = Leading(store, keys, 4, print)
    lead.turn(find_life(store, keys))
    life = find_life(store, keys)
    assert (life.is_start, life.restored) == (True, newest)
    plan = Plan(world=1, leave_running=True, restores=newest)
    phase = Put(keys.phase(life.epoch), phase_text(plan, Phase.COMMITTED))
    store.write([], [phase, Put(keys.settled(life.epoch, 0), settled_text(""))])
    lead.turn(life)
    runs = find_life(store, keys)
    assert (runs.stage, all_recoveries(store, keys)) == (Stage.RUNS, [])
    hung = runs.failed(replace(HUNG, at=time.time() + 20))
    place = standing_text(Standing(way=Way.STOPPED, where=where(context.place.run)))
    store.write([], [Put(keys.life, hung.to_text()), Put(keys.in_life(hung.number, 0), place)])
    lead.turn(find_life(store, keys))
    assert find_life(store, keys).restored == older
    assert set(marks(context)) == {newest}


def test_that_a_job_hung_is_known_after_it_was_given_up(context: Context) -> None:  # noqa: F811
    """Its next start would restore what was made while it hung."""
    store, keys, now = context.store, context.keys, time.time()
    committed(context, now - 300)
    late = committed(context, now - 10)
    stopped(context, replace(HUNG, at=now))
    given_up = give_up(store, keys)
    assert given_up.why() == f"given up by hand; {HUNG.reason}"
    Leading(store, keys, 4, print).turn(find_life(store, keys))
    assert set(marks(context)) == {late}


def test_who_leads_next_counts_no_failure_again(context: Context) -> None:  # noqa: F811
    """That the restored one is surely of no use now says nothing of later ones that were not
    tried."""
    store, keys, now = context.store, context.keys, time.time()
    first = committed(context, now - 30)
    late = committed(context, now - 4)
    before = Mark("it has hung", times=1)
    store.write([], [verified.put_mark(keys, first, before), back(context, now - 22, first)])
    stopped(context, replace(HUNG, at=now), number=2, restored=first)
    for _ in range(2):
        choosing.mark(store, keys, find_life(store, keys), 0)
        assert {number: one.times for number, one in marks(context).items()} == {first: 2, late: 1}


@pytest.mark.parametrize("how", ["hung", "failed again"])
def test_a_failure_counts_once_although_the_job_is_given_up_for_it(
    how: str,
    context: Context,  # noqa: F811
) -> None:
    """A second time would make the checkpoint surely useless, and a start with --afresh would throw
    all work away."""
    store, keys, now = context.store, context.keys, time.time()
    only = committed(context)
    failure = replace(HUNG if how == "hung" else ENDED, at=now)
    store.write([], [back(context, now - 22, only)])
    stopped(context, failure, number=2, restored=only, in_a_row=1 if how == "hung" else 3)
    for reason in ("why", "given up by hand; why"):
        life = find_life(store, keys)
        other = replace(life, failure=replace(failure, reason=reason))
        store.write([], [Put(keys.life, other.to_text())])
        choosing.mark(store, keys, find_life(store, keys), 0)
        assert [(one.times, one.is_sure) for one in marks(context).values()] == [(1, False)]


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_marks_of_which_the_store_has_taken_some_are_completed(
    taken: int,
    context: Context,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was made later than a checkpoint that is of no use counts as tried with it."""
    store, keys, now = context.store, context.keys, time.time()
    numbers = [committed(context) for _ in range(3)]
    put = [verified.put_mark(keys, numbers[0], Mark("it has hung", times=2, is_sure=True))]
    late = Mark("it was begun when the job hung already", is_sure=True)
    put += [verified.put_mark(keys, number, late) for number in numbers[1:]]
    store.write([], [*put, back(context, now - 22, numbers[0])])
    stopped(context, replace(HUNG, at=now), number=2, restored=numbers[0])
    write, left = store.write, [taken]

    def taken_from(requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        if not left[0]:
            raise Unreachable("no answer")
        left[0] -= 1
        return write(requires, puts)

    with monkeypatch.context() as patch:
        patch.setattr(store, "write", taken_from)
        with pytest.raises(Unreachable):
            choosing.mark(store, keys, find_life(store, keys), 0)
    choosing.mark(store, keys, find_life(store, keys), 0)
    assert [marks(context)[number].times for number in numbers] == [3, 2, 2]
