# SPDX-License-Identifier: Apache-2.0
"""Restores that are lost together with a rank's keeper, before the verdict on them."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

from gpustasis.errors import JobError
from gpustasis.jobs import choosing, epochs, kept, verified
from gpustasis.jobs.leading import Leading
from gpustasis.jobs.lives import Stage, recovery_text
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.preempting import next_to_try, to_restore
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, phase_text, settled_text, settlement_of
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.store import Entry, Put
from gpustasis.jobs.verified import Mark
from gpustasis.jobs.work import Excuse, Order
from gpustasis.verifying import Check
from jobs.test_lives import FAILURE, LIFE, RECOVERY
from jobs.test_stopping import committed, stopped
from jobs.test_undoing import context, server, supervisor_of  # noqa: F401 - fixtures


def lost(context: Context, restored: int) -> None:  # noqa: F811
    """A restore of it was committed, and its rank's host has lost its power before the verdict. The
    next keeper, which finds no tasks, does what is left open as any start does."""
    plan = Plan(world=1, leave_running=True, restores=restored)
    number = epochs.begin(context.store, context.keys, plan)
    puts = {
        context.keys.phase(number): phase_text(plan, Phase.COMMITTED),
        context.keys.rank(0): str(number),
        context.keys.record(number, 0): "record",
    }
    context.store.write([], [Put(key, value) for key, value in puts.items()])
    assert not supervisor_of(context).settle()
    assert "its tasks have ended" in verified.verdict(context.store, context.keys, number, 0)


def test_a_checkpoint_whose_restores_take_their_keeper_along_is_not_restored_for_ever(
    context: Context,  # noqa: F811
) -> None:
    """Once may be bad luck. Nobody is there then to restore the next older one in its place."""
    store, keys = context.store, context.keys
    older, newest = committed(context), committed(context)
    check = Check(words=("true",), seconds=60)
    context.options = replace(context.options, check=check, older=True)
    lost(context, newest)
    assert verified.marks(store, keys, [newest]) == {}
    assert to_restore(context) == next_to_try(context, newest) == newest
    lost(context, newest)
    mark = verified.marks(store, keys, [newest])[newest]
    assert (mark.times, mark.is_sure, mark.takes_keepers) == (1, False, True)
    assert to_restore(context) == next_to_try(context, newest) == older
    lost(context, older)
    lost(context, older)
    lost(context, older)
    assert to_restore(context) == newest  # which has failed less often
    verified._store(store, keys, 99, newest, "")  # it is back
    lost(context, newest)
    assert to_restore(context) == newest
    context.options = replace(context.options, older=False)
    lost(context, newest)
    assert to_restore(context) == newest


@pytest.mark.parametrize("text", ["no JSON", '{"version": 1, "problem": "x", "of": "later"}'])
def test_a_mark_that_cannot_be_used_keeps_no_job_from_its_start(
    text: str,
    context: Context,  # noqa: F811
) -> None:
    """Of a newer build, say. It counts as none; the mark of another checkpoint counts."""
    store, keys = context.store, context.keys
    older, newest = committed(context), committed(context)
    context.options = replace(context.options, older=True)
    taken = Mark("why", lost=2)
    store.write([], [Put(f"{keys.epoch(older)}unverified", text)])
    store.write([], [verified.put_mark(keys, newest, taken)])
    told: list[str] = []
    assert to_restore(context, told=told.append) == older
    assert len(told) == 1 and f"{keys.epoch(older)}unverified" in told[0]
    assert "it counts as none" in told[0]
    for strict in (lambda: kept.unverified(store, keys), lambda: kept.prune(store, keys, 1)):
        with pytest.raises(JobError, match="unverified"):  # they show, or remove, what is stored
            strict()


@pytest.mark.parametrize("text", ["no JSON", '{"version": 1, "problem": "x", "of": "later"}'])
@pytest.mark.parametrize("who", ["its keeper", "whoever leads it"])
def test_a_mark_that_cannot_be_used_keeps_no_job_from_a_restore(
    who: str,
    text: str,
    context: Context,  # noqa: F811
    caplog: pytest.LogCaptureFixture,
) -> None:
    """It would wait for ever: nobody writes another mark as long as this one is refused."""
    store, keys = context.store, context.keys
    committed(context)
    newest = committed(context)
    key = f"{keys.epoch(newest)}unverified"
    store.write([], [Put(key, text)])
    verified.tell_once.cache_clear()
    for hung in (False, True):
        if who == "its keeper":
            assert next_to_try(context, newest) == newest
            continue
        failure = replace(FAILURE, rank=0, hung=hung, at=time.time())
        stopped(context, failure, number=2, in_a_row=3, back_off_s=0.0)
        Leading(store, keys, 4, print).turn(find_life(store, keys))
        life = find_life(store, keys)
        assert (life.stage, life.restored) == (Stage.RESTORES, newest)
        epochs.abort(store, keys, life.epoch, "it is over")
    said = [one.getMessage() for one in caplog.records]
    assert len([one for one in said if key in one and "it counts as none" in one]) == 1


def test_only_the_keeper_that_begins_the_restore_reads_marks(
    context: Context,  # noqa: F811
) -> None:
    """All others would for nothing, and read as many as there are epochs."""
    committed(context)
    newest = committed(context)
    put = verified.put_mark(context.keys, newest, Mark("why", lost=2))
    context.store.write([], [put])
    context.options = replace(context.options, older=True)
    context.place = replace(context.place, rank=1)
    assert to_restore(context) == newest
    context.place = replace(context.place, rank=0)
    assert to_restore(context) == newest - 1


def lost_again(context: Context, order: Order) -> str:  # noqa: F811
    """What is said of it."""
    wrong = verified.not_back(context, order, "its tasks have ended", is_lost=True)
    assert wrong.excuse is Excuse.LOST
    assert str(wrong).endswith("its tasks have ended, together with its keeper")
    return str(wrong)


def test_a_checkpoint_of_a_recovered_job_that_takes_its_keepers_along_is_marked(
    context: Context,  # noqa: F811
) -> None:
    """With few restarts its failures alone never mark it, and each start would restore it."""
    checkpoint = committed(context)
    context.life = 1
    for again, found in enumerate(({}, {checkpoint: 1}, {checkpoint: 2})):
        order = Order(checkpoint + 1 + again, leave_running=True, restores=checkpoint, joined=True)
        lost_again(context, order)
        marks = verified.marks(context.store, context.keys, [checkpoint])
        assert {number: one.times for number, one in marks.items()} == found
        assert not any(one.is_sure for one in marks.values())


@pytest.mark.parametrize("how", ["by its verdict", "by its keeper"])
@pytest.mark.parametrize("in_a_row", [1, 2, 3, 4])
def test_what_is_counted_as_lost_is_not_counted_as_a_failure_again(
    in_a_row: int,
    how: str,
    context: Context,  # noqa: F811
) -> None:
    """Also where it is said first that a keeper is gone, and its next one settles what is open."""
    store, keys = context.store, context.keys
    checkpoint = committed(context)
    order = Order(checkpoint + 2, leave_running=True, restores=checkpoint, joined=True)
    lost_again(context, replace(order, number=checkpoint + 1))
    text = lost_again(context, order)
    life = replace(LIFE, number=2, world=1, in_a_row=in_a_row, restored=checkpoint)
    failure = replace(FAILURE, reason=f"epoch 2 has not brought it back: {text}")
    if how == "by its keeper":
        failure = replace(failure, reason="rank 0: its keeper's lease is gone")
        recovery = replace(RECOVERY, epoch=order.number, restored=checkpoint)
        store.write([], [Put(keys.recovery(1), recovery_text(recovery))])
    life = replace(life, stage=Stage.STOPS, failure=replace(failure, hung=False))
    store.write([], [Put(keys.life, life.to_text())])
    choosing.mark(store, keys, find_life(store, keys), 0)
    found = verified.marks(store, keys, [checkpoint])[checkpoint]
    assert (found.times, found.lost, found.why) == (1, 2, text)


def test_an_excuse_is_settled_with_what_went_wrong(context: Context) -> None:  # noqa: F811
    """By the next keeper, of a rank that was lost with the last one, while the store was away."""
    newest = committed(context)
    context.options = replace(context.options, check=Check(words=("true",), seconds=60))
    lost(context, newest)
    found = epochs.standing(context.store, context.keys, newest + 1)
    assert found.excuses == {0: Excuse.LOST}


def test_an_excuse_that_cannot_be_is_refused() -> None:
    assert settlement_of("k", Entry(settled_text("why"), 7)) == ("why", Excuse.NONE)
    text = settled_text("why", Excuse.LOST)
    assert settlement_of("k", Entry(text, 7)) == ("why", Excuse.LOST)
    with pytest.raises(JobError, match="k: problem or excuse is no text"):
        settlement_of("k", Entry(text.replace('"lost"', "7"), 7))


def test_an_excuse_of_a_newer_build_is_one(context: Context) -> None:  # noqa: F811
    """Else nobody could read the epoch any more. It counts as one that says nothing."""
    store, keys = context.store, context.keys
    checkpoint = committed(context)
    number = epochs.begin(store, keys, Plan(world=1, leave_running=True, restores=checkpoint))
    text = settled_text("why", Excuse.LOST).replace("lost", "spot instance")
    store.write([], [Put(keys.settled(number, 0), text)])
    found = epochs.standing(store, keys, number)
    assert (found.problems, found.excuses) == ({0: "why"}, {0: Excuse.OTHER})
    verified._decide(store, keys, number, counts=True)
    assert verified.marks(store, keys, [checkpoint]) == {}


@pytest.mark.parametrize(("other", "lost"), [(Excuse.LOST, 1), (Excuse.OTHER, 0), (Excuse.NONE, 0)])
def test_a_rank_that_is_lost_with_its_keeper_counts_if_no_other_says_more(
    other: Excuse,
    lost: int,
    context: Context,  # noqa: F811
) -> None:
    """Another rank's that was told to end may have taken it along; one whose command has failed
    says something of the checkpoint itself."""
    store, keys = context.store, context.keys
    checkpoint = committed(context)
    plan = Plan(world=2, leave_running=True, restores=checkpoint)
    number = epochs.begin(store, keys, plan)
    puts = {0: settled_text("rank 0", Excuse.LOST), 1: settled_text("rank 1", other)}
    store.write([], [Put(keys.settled(number, rank), text) for rank, text in puts.items()])
    verified._decide(store, keys, number, counts=True)
    found = verified.all_marks(store, keys, [checkpoint]).get(checkpoint, Mark())
    assert (found.lost, bool(found.why)) == (lost, other is Excuse.NONE)


def test_one_epoch_is_lost_once_whoever_says_so(context: Context) -> None:  # noqa: F811
    store, keys = context.store, context.keys
    words = store, keys, 7, 1
    for wrong in ("rank 0 was", "rank 1 was"):
        verified._store(*words, wrong, excuse=Excuse.LOST)
    assert verified.all_marks(store, keys, [1]) == {1: Mark(lost=1)}
    assert verified.verdict(store, keys, 7, 0) == "rank 0 was"


def test_a_restore_that_is_back_forgets_what_was_lost_and_keeps_other_failures(
    context: Context,  # noqa: F811
) -> None:
    store, keys = context.store, context.keys
    before = Mark("it has failed again", is_luck=True, lost=1)
    store.write([], [verified.put_mark(keys, 1, before)])
    verified._store(store, keys, 7, 1, "")
    assert verified.all_marks(store, keys, [1]) == {1: replace(before, lost=0)}
    verified._store(store, keys, 8, 1, "its host was lost", excuse=Excuse.LOST)
    assert not verified.all_marks(store, keys, [1])[1].takes_keepers


def test_what_says_nothing_leaves_what_was_lost_before(context: Context) -> None:  # noqa: F811
    store, keys = context.store, context.keys
    for number, excuse in enumerate((Excuse.LOST, Excuse.OTHER, Excuse.LOST), start=7):
        verified._store(store, keys, number, 1, "why", excuse=excuse)
        found = verified.all_marks(store, keys, [1])[1]
        assert found.lost == (2 if number == 9 else 1)
    assert found.takes_keepers


@pytest.mark.parametrize("how", ["fails", "hangs at once", "was made while it hung"])
def test_what_was_lost_stays_known_when_the_job_fails_in_another_way(
    how: str,
    context: Context,  # noqa: F811
) -> None:
    """Else the next restore that takes a keeper along counts as the first one."""
    store, keys, now = context.store, context.keys, time.time()
    checkpoint = committed(context, now - 5 if how == "was made while it hung" else 0.0)
    order = Order(checkpoint + 1, leave_running=True, restores=checkpoint, joined=True)
    lost_again(context, order)
    failure = replace(FAILURE, rank=0, at=now, unnoticed_s=20.0, hung=how != "fails")
    life = replace(LIFE, number=2, world=1, in_a_row=3, restored=checkpoint, failure=failure)
    recovery = replace(RECOVERY, at=now - 30, restored=checkpoint)
    store.write([], [Put(keys.recovery(1), recovery_text(recovery))])
    if how == "was made while it hung":
        life = replace(life, restored=0)
    life = replace(life, stage=Stage.STOPS)
    store.write([], [Put(keys.life, life.to_text())])
    choosing.mark(store, keys, find_life(store, keys), 0)
    found = verified.marks(store, keys, [checkpoint])[checkpoint]
    assert (found.times, found.lost) == (1, 1)
    lost_again(context, replace(order, number=checkpoint + 2))
    assert verified.marks(store, keys, [checkpoint])[checkpoint].takes_keepers
