# SPDX-License-Identifier: Apache-2.0
"""From which checkpoint a job that has failed goes on, and what its failures say of them."""

from __future__ import annotations

import json
import time
from contextlib import closing
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.errors import JobError
from gpustasis.jobs import choosing, epochs, kept, verified
from gpustasis.jobs.leading import Leading, read_ranks
from gpustasis.jobs.lives import (
    Failure,
    Recovery,
    Stage,
    Terms,
    keeper_of,
    keeper_starts,
    keeper_text,
    life_of,
    recovery_text,
)
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import settled_text
from gpustasis.jobs.steering import find_life
from gpustasis.jobs.store import Entry, Put
from gpustasis.jobs.verified import Mark, mark_of, put_mark
from jobs.test_lives import FAILURE, HERE, LIFE
from jobs.test_stopping import committed, recovering, stopped
from jobs.test_undoing import context, server  # noqa: F401 - fixtures
from support.changed_text import read_or_refused

HUNG = Failure(rank=0, reason="why", at=0.0, unnoticed_s=20.0, hung=True)
ENDED = Failure(rank=0, reason="why", at=0.0, unnoticed_s=0.2)
MARK = Mark("why", 2, is_sure=True)


def marks(context: Context) -> dict[int, Mark]:  # noqa: F811
    return kept.marks(context.store, context.keys)


def put(context: Context, number: int, mark: Mark) -> None:  # noqa: F811
    context.store.write([], [put_mark(context.keys, number, mark)])


def restored_after(
    context: Context,  # noqa: F811
    failure: Failure,
    *,
    worked_s: float | None = 0.0,
    afresh: bool = False,
    starts: bool = True,
    now: float = 0.0,
    **fields: int,
) -> int:
    """The checkpoint that is restored next, or is to be; 0: the command is started. worked_s: until
    the last sign of progress of a job that was restored; None: that was aborted. now: 0: it is."""
    store, keys, now = context.store, context.keys, now or time.time()
    failure = replace(failure, at=now)
    fields = {"number": 2, "in_a_row": 1, "begun": 1, **fields}
    if worked_s is not None:
        recovery = Recovery(
            life=fields["number"] - 1,
            rank=0,
            reason="why",
            at=now - failure.unnoticed_s - worked_s - 5.0,
            unnoticed_s=1.0,
            seconds=5.0,
            epoch=77,
            restored=fields.get("restored", 0),
        )
        store.write([], [Put(keys.recovery(recovery.life), recovery_text(recovery))])
    stopped(context, failure, afresh=afresh, starts=starts, back_off_s=0.0, **fields)
    Leading(store, keys, 4, print).turn(find_life(store, keys))
    life = find_life(store, keys)
    if life.stage is Stage.RESTORES:
        epochs.abort(store, keys, life.epoch, "it is over")
    else:
        assert (life.stage, life.restored) == (Stage.RUNS, 0)
    return life.restored


# What was made while it hung.


def test_one_that_was_asked_for_later_is_no_older_one(context: Context) -> None:  # noqa: F811
    now = time.time()
    committed(context, now - 21)
    asked_for = committed(context)
    late = committed(context, now - 10)
    assert restored_after(context, HUNG, now=now) == asked_for
    assert set(marks(context)) == {late}


@pytest.mark.parametrize("older", [0.0, 50.0])
def test_one_that_is_marked_already_is_no_older_one(older: float, context: Context) -> None:  # noqa: F811
    """So that from just before the last sign is what is left."""
    now = time.time()
    marked = committed(context, now - older if older else 0.0)
    put(context, marked, Mark("it was not verified"))
    unsure = committed(context, now - 21)
    late = committed(context, now - 10)
    assert restored_after(context, HUNG, now=now) == unsure
    assert {number: one.is_sure for number, one in marks(context).items()} == {
        marked: False,
        late: True,
    }


def test_beyond_one_that_is_marked_an_older_one_is_found(context: Context) -> None:  # noqa: F811
    now = time.time()
    good = committed(context, now - 70)
    put(context, committed(context, now - 50), Mark("it was not verified"))
    unsure = committed(context, now - 21)
    assert restored_after(context, HUNG, now=now) == good
    why = "it was begun when the job hung already, or just before: why"
    assert marks(context)[unsure] == Mark(why, is_luck=True)


def test_one_from_just_before_the_last_sign_is_of_no_use_once_it_has_hung_twice(
    context: Context,  # noqa: F811
) -> None:
    """As any other: that it was begun then says nothing."""
    now = time.time()
    good = committed(context, now - 70)
    unsure = committed(context, now - 21)
    put(context, committed(context), MARK)
    assert restored_after(context, HUNG, now=now) == good
    found = []
    for number in (3, 4):
        restored_after(context, HUNG, number=number, restored=unsure)
        one = marks(context)[unsure]
        found.append((one.times, one.is_sure))
    assert found == [(2, False), (3, True)]


# What hangs at once.


@pytest.mark.parametrize(("worked_s", "is_marked"), [(30.0, True), (50.0, False)])
def test_how_long_dumps_took_does_not_make_a_hang_one_at_once(
    worked_s: float,
    is_marked: bool,
    context: Context,  # noqa: F811
) -> None:
    """It has worked for most of the time after which a rank hangs."""
    committed(context)
    newest = committed(context)
    hung = replace(HUNG, unnoticed_s=153.0, held_s=90.0)
    after = restored_after(context, hung, restored=newest, worked_s=worked_s)
    assert (after != newest) == is_marked == (newest in marks(context))


def test_one_hopeless_checkpoint_is_not_restored_for_ever(context: Context) -> None:  # noqa: F811
    """Each of those that may have had bad luck is tried again before one of them is for the third
    time; then one that was surely made of a job that hung."""
    now = time.time()
    for at in (-900, -600, -300):
        committed(context, now + at)
    put(context, 1, Mark("it was begun when the job hung already", is_sure=True))
    found = [3]
    for number in range(2, 9):
        found.append(restored_after(context, HUNG, number=number, restored=found[-1]))
    assert found == [3, 2, 3, 2, 1, 1, 2, 3]
    assert {number: one.is_sure for number, one in marks(context).items()} == {
        1: True,
        2: True,
        3: True,
    }


@pytest.mark.parametrize("starts", [True, False])
def test_it_starts_afresh_once_all_have_failed_twice(starts: bool, context: Context) -> None:  # noqa: F811
    """One of which nobody knows but that it was begun after the last sign of progress is tried
    once. And never where a keeper has no command, as long as there is a checkpoint."""
    now = time.time()
    late = committed(context, now - 10)
    good = committed(context)

    def fails(number: int, restored: int) -> int:
        words = {"afresh": True, "starts": starts}
        return restored_after(context, HUNG, number=number, restored=restored, **words)

    assert fails(2, good) == good
    assert fails(3, good) == late
    assert fails(4, late) == (0 if starts else late)


def test_what_is_made_while_one_of_them_hangs_again_does_not_keep_it_from_starting_afresh(
    context: Context,  # noqa: F811
) -> None:
    """Each life that hangs makes another one by the clock, and a restart is a life."""
    found: list[int] = []
    for number in range(2, 6):
        for at in (-12, -4):
            committed(context, time.time() + at)
        restored = found[-1] if found else 0
        found.append(restored_after(context, HUNG, afresh=True, number=number, restored=restored))
    assert found == [1, 0, 6, 0]
    assert all(one.times == 2 for one in marks(context).values())


@pytest.mark.parametrize(("begun", "restored"), [(98, 1), (99, 0)])
def test_the_last_restart_is_for_the_command(
    begun: int,
    restored: int,
    context: Context,  # noqa: F811
) -> None:
    """And not for a checkpoint of a job that hung, as it seems."""
    committed(context, time.time() - 10)
    assert restored_after(context, HUNG, afresh=True, begun=begun) == restored


def test_what_may_have_been_bad_luck_makes_nothing_surely_useless() -> None:
    unlucky = Mark().again("it failed", is_luck=True).again("it failed", is_luck=True)
    assert (unlucky.times, unlucky.is_sure) == (2, False)
    hung = unlucky.again("it hung")
    assert not hung.is_sure
    assert hung.again("it hung").is_sure
    assert Mark().again("it hung").again("it hung").is_sure
    assert mark_of("k", Entry(unlucky.to_text(), 7)) == unlucky


def test_a_job_that_has_a_checkpoint_is_not_given_up_for_want_of_a_command(
    context: Context,  # noqa: F811
) -> None:
    now = time.time()
    older, _ = (committed(context, now - at) for at in (15, 10))
    assert restored_after(context, HUNG, afresh=True, starts=False) == older


@pytest.mark.parametrize("can_start", [True, False])
def test_a_keeper_says_whether_it_has_a_command(can_start: bool, context: Context) -> None:  # noqa: F811
    _, rank = recovering(context)
    with closing(rank):
        rank.begin(new=True, can_start=can_start)
        life = find_life(context.store, context.keys)
        found = read_ranks(context.store, context.keys, life).cannot_start
        assert found == (frozenset() if can_start else {0})


def test_what_is_from_before_the_end_of_the_job_is_never_gone_on_from(
    context: Context,  # noqa: F811
) -> None:
    before = committed(context)
    newer = committed(context)
    put(context, newer, MARK)
    assert restored_after(context, ENDED, ended=before) == newer


# What fails again and again.


def test_what_fails_twice_in_a_row_is_followed_by_the_next_older_one(
    context: Context,  # noqa: F811
) -> None:
    """However often they fail so, that may be bad luck: nothing is thrown away for it."""
    older, newest = committed(context), committed(context)

    def fails(restored: int, in_a_row: int, number: int) -> int:
        fields = {"restored": restored, "in_a_row": in_a_row, "number": number}
        return restored_after(context, ENDED, worked_s=4.0, afresh=True, **fields)

    assert fails(newest, 2, 2) == newest
    assert marks(context) == {}
    assert fails(newest, 3, 3) == older
    why = "it has failed again, in life 3, 4 s after it was restored: why"
    assert marks(context) == {newest: Mark(why, is_luck=True)}
    assert kept.unverified(context.store, context.keys) == {newest: f"not verified: {why}"}
    assert find_life(context.store, context.keys).in_a_row == 1
    assert fails(older, 2, 4) == older
    found = [older]
    for number in range(5, 10):
        found.append(fails(found[-1], 3, number))
    assert found == [older, newest, older, newest, older, newest]
    assert find_life(context.store, context.keys).in_a_row == 3  # it is waited longer and longer
    assert not any(one.is_sure for one in marks(context).values())


@pytest.mark.parametrize("wrong", ["rank 0 is not back: it has failed", "x" * 5000])
def test_what_a_verdict_has_counted_is_not_counted_again(
    wrong: str,
    context: Context,  # noqa: F811
) -> None:
    """However often in a row; and a restore that is verified clears it."""
    store, keys, number = context.store, context.keys, committed(context)
    life = replace(LIFE, world=1, in_a_row=3, restored=number, terms=Terms(restarts=99))
    for verdict in (77, 78):
        verified._store(store, keys, verdict, number, wrong)
        reason = f"epoch {verdict} has not brought it back: {wrong}"
        life = life.not_back(replace(ENDED, reason=reason, at=time.time()))
        store.write([], [Put(keys.life, life.to_text())])
        choosing.mark(store, keys, find_life(store, keys), 0)
        found = marks(context)[number]
        assert (found.times, found.by_verdict) == (verdict - 76, True)
    verified._store(store, keys, 79, number, "")
    assert marks(context) == {}


@pytest.mark.parametrize("how", ["aborted", "late", "newer"])
def test_which_failures_are_not_the_checkpoint_s(how: str, context: Context) -> None:  # noqa: F811
    older, newest = committed(context), committed(context)
    if how == "newer":
        newer = committed(context)
        assert restored_after(context, ENDED, restored=newest, in_a_row=3) == newer
    elif how == "late":
        fields = {"restored": newest, "in_a_row": 3}
        assert restored_after(context, ENDED, worked_s=301.0, **fields) == newest
    else:
        found = restored_after(context, ENDED, worked_s=None, restored=newest, in_a_row=3)
        assert found == older
        assert marks(context)[newest].why == "it has failed again, in life 2: why"
        return
    assert marks(context) == {}


def test_the_next_leader_of_the_same_life_counts_nothing_twice(
    context: Context,  # noqa: F811
) -> None:
    """The first one has died before it has begun an epoch."""
    newest = committed(context)
    restored_after(context, HUNG, restored=newest)
    life = find_life(context.store, context.keys)
    failed = replace(life, stage=Stage.STOPS, failure=replace(HUNG, at=time.time()))
    context.store.write([], [Put(context.keys.life, failed.to_text())])
    choosing.mark(context.store, context.keys, find_life(context.store, context.keys), 0)
    assert [(one.times, one.is_sure) for one in marks(context).values()] == [(1, False)]


def test_a_leader_of_a_life_that_is_over_marks_nothing(context: Context) -> None:  # noqa: F811
    """Another one has counted it, and the job is in its next life."""
    now = time.time()
    committed(context)
    newest = committed(context, now - 10)
    stopped(context, replace(HUNG, at=now), number=2, in_a_row=1, begun=1)
    life = find_life(context.store, context.keys)
    failed = replace(life, failure=replace(HUNG, at=now))
    put(context, newest, Mark("of the next life", 3))
    context.store.write([], [Put(context.keys.life, life.to_text())])
    choosing.mark(context.store, context.keys, failed, 0)
    assert marks(context) == {newest: Mark("of the next life", 3)}


# What is stored.


def test_what_is_written_is_read() -> None:
    for mark in (MARK, replace(MARK, lost=2)):
        assert mark_of("k", Entry(mark.to_text(), 7)) == mark
    text = keeper_text("me", HERE, starts=False)
    assert keeper_of("k", Entry(text, 7)) == ("me", HERE)
    assert not keeper_starts("k", Entry(text, 7))
    assert keeper_starts("k", Entry(keeper_text("me", HERE), 7))


def test_what_earlier_builds_have_stored_is_read() -> None:
    assert mark_of("k", Entry(settled_text("why"), 7)) == Mark("why")
    seat = json.loads(keeper_text("me", HERE))
    del seat["starts"]
    assert keeper_starts("k", Entry(json.dumps(seat), 7))
    life = json.loads(replace(LIFE, failure=FAILURE).to_text())
    del life["failure"]["held_s"]
    assert life_of("k", Entry(json.dumps(life), 7)).failure == FAILURE


@given(st.data())
def test_any_text_is_read_or_refused(data: st.DataObject) -> None:
    read_or_refused(mark_of, MARK.to_text(), data)


@pytest.mark.parametrize(
    "changed",
    [
        *({"problem": 1}, {"times": 0}, {"times": True}, {"sure": 1}, {"luck": 1}, {"more": 1}),
        *({"lost": -1}, {"lost": True}),
    ],
)
def test_a_mark_that_cannot_be_is_refused(changed: dict[str, object]) -> None:
    with pytest.raises(JobError):
        mark_of("k", Entry(json.dumps(json.loads(MARK.to_text()) | changed), 7))
