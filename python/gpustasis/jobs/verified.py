# SPDX-License-Identifier: Apache-2.0
"""A restored job whose ranks have a command that verifies them: all are back, or none is.

Each keeper runs its own command once its tasks run again, and settles the epoch with what went
wrong. One verdict is stored: by the first whose command has failed, before it kills its tasks, for
others may end of that; or by rank 0's keeper, when all have settled. Every keeper does what it
says: the tasks go on, or are killed.

epochs/E/back        of an epoch that restores: the verdict
epochs/E/unverified  of the checkpoint that it restored: why that did not bring the job back (Mark)
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache

from gpustasis.errors import JobError, StoreError, VerificationError
from gpustasis.jobs import epochs
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import (
    MAX_EPOCH,
    Keys,
    fields_of,
    note_of,
    settled_of,
    settled_text,
)
from gpustasis.jobs.stopping import stop
from gpustasis.jobs.store import Entry, Put, Require, Store
from gpustasis.jobs.work import Excuse, Excused, Order
from gpustasis.verifying import require_verified

log = logging.getLogger(__name__)

_POLL_S = 0.2
_MANY = 1024  # ranks, of which not all are read that often
_POLL_MANY_S = 2.0
_LEAD_S = 30.0  # after that the others do not wait for rank 0's verdict: they look themselves
_SAYS = {
    Excuse.NONE: "",
    Excuse.OTHER: ", which says nothing of the checkpoint",
    Excuse.LOST: ", together with its keeper",
}
_ENDING_S = 10.0  # tasks that were told to end are given this long before it counts that they live
_OFTEN = 2  # restores that were lost together with a keeper: that is no bad luck any more
_VERSION = 1


@dataclass(frozen=True, slots=True)
class Mark:
    """Of a checkpoint. why: it did not bring the job back when it was restored last, or will not;
    empty: nothing is held against it. times: how often. is_sure: it never will. by_verdict: only
    verdicts were against it, and one that it is back clears it. is_luck: it may have been bad luck
    each time. lost: how many restores of it since it was back last were lost together with a
    keeper."""

    why: str = ""
    times: int = 1
    is_sure: bool = False
    by_verdict: bool = False
    is_luck: bool = False
    lost: int = 0

    @property
    def takes_keepers(self) -> bool:
        """Its restore does, as it seems: nobody is there to restore another one in its place."""
        return self.lost >= _OFTEN

    def was_lost(self, why: str) -> Mark:
        """Together with a keeper, once more."""
        mark = replace(self, lost=self.lost + 1)
        return mark.again(why, is_luck=True, by_verdict=True) if mark.takes_keepers else mark

    def again(self, why: str, *, is_luck: bool = False, by_verdict: bool = False) -> Mark:
        """It has failed once more. is_luck: that may be bad luck however often."""
        before = self.times if self.why else 0
        is_sure = self.is_sure or (before > 0 and not is_luck and not self.is_luck)
        by_verdict = by_verdict and (self.by_verdict or not before)
        is_luck = is_luck and (self.is_luck or not before)
        return Mark(note_of(why), before + 1, is_sure, by_verdict, is_luck, self.lost)

    def to_text(self) -> str:
        """The value of its key."""
        value = {"version": _VERSION, "problem": note_of(self.why)}
        more = {
            "times": self.times,
            "sure": self.is_sure,
            "verdict": self.by_verdict,
            "luck": self.is_luck,
        }
        return json.dumps(value | more | ({"lost": self.lost} if self.lost else {}))


def mark_of(key: str, entry: Entry) -> Mark:
    """Raises JobError."""
    words = {"times": 1, "sure": False, "verdict": False, "luck": False, "lost": 0}
    value = fields_of(key, entry, "version", "problem", **words)
    why, times, is_sure = value["problem"], value["times"], value["sure"]
    if not isinstance(why, str) or type(times) is not int or not 0 < times <= MAX_EPOCH:
        raise JobError(f"{key}: problem is no text, or times no number")
    if type(value["lost"]) is not int or not 0 <= value["lost"] <= MAX_EPOCH:
        raise JobError(f"{key}: lost is no number")
    if not all(type(value[name]) is bool for name in ("sure", "verdict", "luck")):
        raise JobError(f"{key}: sure, verdict or luck is neither true nor false")
    return Mark(why, times, is_sure, value["verdict"], value["luck"], value["lost"])


def verify(context: Context, order: Order, images: str) -> None:
    """Run the rank's command, if it has one, beside its tasks. Raises JobError: they were killed,
    or have ended. If this keeper was told to end, that says nothing of the checkpoint."""
    check = context.options.check
    if check is None:
        return

    def look() -> None:
        note_told(context, order.number)
        if not context.state.lives:
            raise VerificationError("its tasks have ended")

    facts = {
        "GPUSTASIS_ROOT_PID": str(context.state.pid),
        "GPUSTASIS_CHECKPOINT": images,
        "GPUSTASIS_JOB": context.place.job,
        "GPUSTASIS_RANK": str(context.place.rank),
        "GPUSTASIS_EPOCH": str(order.restores),
    }
    try:
        require_verified(check, facts, look)
        look()
    except VerificationError as exc:
        wrong = not_back(context, order, str(exc))
        try:
            end_tasks(context)
        except JobError as left:
            raise Excused(f"{wrong}; {left}", wrong.excuse) from exc
        raise wrong from exc


def note_told(context: Context, number: int) -> None:
    """Whoever has told this keeper to end may kill it, and its tasks, before the verdict on epoch
    `number`: that it was told is for the next one to know. Not done by the signal's handler, which
    may have come in the middle of another note."""
    if context.told_at and context.state.told != number:
        with suppress(OSError):  # then it is not
            context.note(told=number)


def not_back(context: Context, order: Order, why: str, *, is_lost: bool = False) -> Excused:
    """Have that be the verdict, unless there is one. is_lost: with an earlier keeper; else it says
    something of the checkpoint, unless this one was told to end."""
    excuse = Excuse.NONE
    was_told = context.told_at > 0 or _have_ended_of(context, order.number)
    if was_told or is_lost:
        excuse = Excuse.OTHER if was_told else Excuse.LOST
    text = f"{context.name} is not back: {why}{_SAYS[excuse]}"
    with suppress(StoreError):  # then all learn it when this is settled
        words = context.store, context.keys, order.number, order.restores, text
        _store(*words, excuse=excuse)
    return Excused(text, excuse)


def _have_ended_of(context: Context, number: int) -> bool:
    """Whether tasks have ended, or do so now, of what an earlier keeper was told in epoch `number`.
    Those that live in spite of it have not failed because of it."""
    deadline = time.monotonic() + _ENDING_S
    while context.state.told == number and context.state.lives:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_S)
    return context.state.told == number


def end_tasks(context: Context) -> None:
    """Kill the rank's tasks, all of them, with what is no longer below their root: an older
    checkpoint may be restored beside it. Raises JobError if one does not end."""
    state = context.state
    try:
        stop(state.pid, state.start_time, context.kin.known)
    except JobError as exc:
        raise JobError(f"{context.name}: {exc}") from exc


def await_verdict(
    context: Context, number: int, *, problem: bool, gives_up: Callable[[], bool]
) -> str | None:
    """Why the job is not back after the restore of epoch `number`; empty: it is; None: gives_up has
    become true before that was known. Tasks of this rank that end meanwhile say nothing: they may
    miss others that were killed. problem: this rank has settled with one. Raises JobError."""
    store, keys, key = context.store, context.keys, _verdict(context.keys, number)
    decides = problem or context.place.rank == LEAD
    pause = _POLL_S if context.world <= _MANY else _POLL_MANY_S
    begin = time.monotonic()
    while True:
        note_told(context, number)  # first: a store that is away may take long to say so
        with suppress(StoreError):  # it is away; the tasks run meanwhile
            entry = store.read(key).entries.get(key)
            if entry is not None:
                return settled_of(key, entry)
            if decides or time.monotonic() - begin > _LEAD_S:
                # Tasks that live in spite of what an earlier keeper was told have not ended of it.
                state = context.state
                was_told = context.told_at > 0 or (state.told == number and not state.lives)
                _decide(store, keys, number, counts=not was_told)
        if gives_up():
            return None
        time.sleep(pause)


def _decide(store: Store, keys: Keys, number: int, *, counts: bool) -> None:
    """Store the verdict, if all that it needs is there, and nobody else has stored one."""
    found = epochs.standing(store, keys, number)
    problems = {rank: text for rank, text in sorted(found.problems.items()) if text}
    wrong = "; ".join(problems.values())
    excuses = {found.excuses.get(rank, Excuse.NONE) for rank in problems}
    excuse = next((one for one in (Excuse.NONE, Excuse.OTHER) if one in excuses), Excuse.LOST)
    if not wrong and found.settled != frozenset(range(found.plan.world)):
        return
    excuse = excuse if counts else Excuse.OTHER
    _store(store, keys, number, found.plan.restores, wrong, excuse=excuse)


def _store(
    store: Store,
    keys: Keys,
    number: int,
    restored: int,
    wrong: str,
    *,
    excuse: Excuse = Excuse.NONE,
) -> None:
    """The verdict on epoch `number`, unless there is one. Without an excuse it marks the
    checkpoint; with that it was lost, the second time."""
    before = all_marks(store, keys, [restored]).get(restored, Mark())
    if not wrong:  # what it has done after it was back, before, stays known
        mark = replace(before, lost=0) if before.why and not before.by_verdict else Mark()
    elif excuse is Excuse.LOST:
        mark = before.was_lost(wrong)
    else:
        mark = before.again(wrong, by_verdict=True)
    puts = [Put(_verdict(keys, number), settled_text(wrong))]
    if not wrong or excuse is not Excuse.OTHER:
        puts.append(put_mark(keys, restored, mark))
    store.write([Require(_verdict(keys, number), 0)], puts)


def left_open(context: Context) -> int:
    """The epoch that has restored the tasks, and whose verdict an earlier keeper has not done; 0:
    there is none. They may have ended because of it: others were killed. Raises JobError,
    StoreError."""
    number = context.state.epoch
    if not number:
        return 0
    epoch, _ = epochs.phase(context.store, context.keys, number)
    return number if epoch.restores and epoch.phase is Phase.COMMITTED else 0


def verdict(store: Store, keys: Keys, number: int, patience_s: float) -> str:
    """For whoever has asked for a restore: why the job is not back; empty: it is, or no rank had a
    command. Raises JobError, StoreError."""
    key, end = _verdict(keys, number), time.monotonic() + patience_s
    while True:
        entry = store.read(key).entries.get(key)
        if entry is not None:
            return settled_of(key, entry)
        if time.monotonic() >= end:
            return ""
        time.sleep(_POLL_S)


@lru_cache
def tell_once(text: str) -> None:
    """For who looks again and again."""
    log.warning("%s", text)


def marks(
    store: Store,
    keys: Keys,
    numbers: Iterable[int],
    told: Callable[[str], object] | None = tell_once,
) -> dict[int, Mark]:
    """Of those checkpoints that have one, which holds something against them. told: as
    all_marks."""
    found = all_marks(store, keys, numbers, told)
    return {number: mark for number, mark in found.items() if mark.why}


def all_marks(
    store: Store,
    keys: Keys,
    numbers: Iterable[int],
    told: Callable[[str], object] | None = tell_once,
) -> dict[int, Mark]:
    """With those that hold nothing against a checkpoint. told: hears of those that cannot be used:
    of a newer build, say. They count as none: else nobody would restore the job any more. None: one
    that cannot be used is refused. Raises JobError then; StoreError."""
    wanted = {_mark(keys, number): number for number in numbers}
    found: dict[int, Mark] = {}
    for key, entry in (store.read(*wanted).entries if wanted else {}).items():
        if key not in wanted:
            continue
        try:
            found[wanted[key]] = mark_of(key, entry)
        except JobError as exc:
            if told is None:
                raise
            told(f"{exc}: it counts as none")
    return found


def put_mark(keys: Keys, number: int, mark: Mark) -> Put:
    """Of a checkpoint."""
    return Put(_mark(keys, number), mark.to_text())


def _verdict(keys: Keys, number: int) -> str:
    return f"{keys.epoch(number)}back"


def _mark(keys: Keys, number: int) -> str:
    return f"{keys.epoch(number)}unverified"
