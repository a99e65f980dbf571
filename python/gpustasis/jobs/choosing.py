# SPDX-License-Identifier: Apache-2.0
"""Which checkpoint a job that has failed is restored from, and which of them its failures mark.

A mark that may be bad luck (it hung as soon as it was restored, it was not verified, it failed
twice in a row) only puts a checkpoint behind those that have failed less often. One that was begun
when the job hung already, or that hung or was not verified a second time, is surely of no use. What
may only have been begun then has not failed yet, although it is marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gpustasis.jobs import kept, verified
from gpustasis.jobs.epochs import Standing
from gpustasis.jobs.lives import Failure, Life, Recovery, recovery_of
from gpustasis.jobs.records import Keys
from gpustasis.jobs.store import Require, Store
from gpustasis.jobs.verified import Mark

_AT_ONCE_S = 2.0  # by the clocks of two hosts
_OFTEN = 3  # failures: the first one, and two after the same checkpoint was restored
_SOON_S = 300.0  # what fails later has worked
_HUNG = "the job hung as soon as it was restored"
_FAILED = "it has failed again"
_SAME = 1000  # characters of a reason, of which the store does not keep what is too long


@dataclass(frozen=True, slots=True)
class Choice:
    """A checkpoint, and what is held against it."""

    found: Standing
    mark: Mark


def choose(
    store: Store, keys: Keys, after: int, marks: Mapping[int, Mark] | None = None
) -> Choice | None:
    """Of the whole checkpoints later than epoch `after` the newest without a mark. If all have one,
    of those that may come back, that have failed least often, the newest; if none may, the oldest.
    None: there is no checkpoint. marks: if they were read already. Raises JobError, StoreError."""
    marks = kept.marks(store, keys) if marks is None else marks
    best: Choice | None = None
    found = kept.newest_whole_or_none(store, keys)
    while found is not None and found.number > after:
        one = Choice(found, marks.get(found.number, Mark()))
        if not one.mark.why:
            return one
        if best is None or _order(one) < _order(best):
            best = one
        found = kept.next_older(store, keys, found)
    return best


def _order(one: Choice) -> tuple[bool, int, int]:
    number, mark = one.found.number, one.mark
    return mark.is_sure, mark.times, number if mark.is_sure else -number


def mark(store: Store, keys: Keys, life: Life, after: int) -> None:
    """Mark what, by the failure of this life, does not bring the job back. Nothing changes if that
    was done before. after: as of choose(). Raises JobError, StoreError."""
    failure = life.failure
    assert failure is not None
    if not failure.hung and life.in_a_row < _OFTEN:
        return
    marks = kept.all_marks(store, keys)  # what was lost stays known
    found = _made_while_hung(store, keys, failure, marks) if failure.hung else {}
    restored, went_on_s = marks.get(life.restored, Mark()), _went_on_s(store, keys, life)
    if failure.hung and went_on_s is not None and went_on_s < failure.idle_s / 2 + _AT_ONCE_S:
        # It was made of a job that hung already, before anybody had noticed.
        why = f"{_in(_HUNG, life)}: {failure.reason}"
        found[life.restored] = _again(restored, life, why)
        # Nor can one that was made later of a job that hung be better.
        if restored.is_sure and not _is_counted(restored, life):
            for number, one in {**marks, **found}.items():
                if number > life.restored and one.is_sure and one.times == 1:
                    found[number] = replace(one, times=2)
    elif restored.why and restored.why[:_SAME] in _said_of(store, keys, life):
        pass  # a verdict, which has counted it (verified.py)
    elif life.in_a_row >= _OFTEN and (went_on_s is None or went_on_s < _SOON_S):
        chosen = choose(store, keys, after, {**marks, **found})
        if chosen is not None and chosen.found.number == life.restored:  # there is no newer one
            when = "" if went_on_s is None else f", {went_on_s:.0f} s after it was restored"
            why = f"{_in(_FAILED, life)}{when}: {failure.reason}"
            found[life.restored] = _again(restored, life, why, is_luck=True)
    require = Require(keys.life, life.revision)
    # One by one: etcd takes no transaction of any size. The restored one's says that all are there.
    for number in sorted(found, key=lambda number: number == life.restored):
        store.write([require], [verified.put_mark(keys, number, found[number])])


def _again(mark: Mark, life: Life, why: str, *, is_luck: bool = False) -> Mark:
    """Unless it was counted already."""
    return mark if _is_counted(mark, life) else mark.again(why, is_luck=is_luck)


def _is_counted(mark: Mark, life: Life) -> bool:
    """Whether the failure of this life was: by another leader, or before the job was given up, for
    another reason then."""
    return mark.why.startswith(
        tuple(f"{_in(what, life)}{end}" for what in (_HUNG, _FAILED) for end in (":", ","))
    )


def _in(what: str, life: Life) -> str:
    return f"{what}, in life {life.number}"


def _said_of(store: Store, keys: Keys, life: Life) -> str:
    """The failure, with what it was that ended the life, and the verdict on its restore. A rank
    that was lost with its keeper has its verdict from the next one, and another failure before."""
    last, reason = _last_recovery(store, keys, life), life.why()
    if last is None or not last.epoch:
        return reason
    return f"{reason}; {verified.verdict(store, keys, last.epoch, 0.0)}"


def _last_recovery(store: Store, keys: Keys, life: Life) -> Recovery | None:
    """By which this life has come to be, of a job that was restored; None: that is not known, or
    the restore has failed."""
    names = keys.recovery(life.number - 1), keys.started(life.number - 1)
    found = store.read(*names).entries
    if not life.restored or not found:
        return None
    key = names[0] if names[0] in found else names[1]
    last = recovery_of(key, found[key])
    return last if last.restored == life.restored else None


def _went_on_s(store: Store, keys: Keys, life: Life) -> float | None:
    """From when all ranks ran again until the last sign of progress, of a job that was restored;
    None: that is not known, or the restore has failed."""
    last = _last_recovery(store, keys, life)
    if life.failure is None or last is None:
        return None
    return max(0.0, life.failure.at - life.failure.unnoticed_s - last.at - last.seconds)


def _made_while_hung(
    store: Store, keys: Keys, failure: Failure, marks: Mapping[int, Mark]
) -> dict[int, Mark]:
    """Marks for the whole checkpoints by the clock that were begun after the last sign of progress.
    Those begun just before may be of a job that hung, too: keepers look now and then, and hosts'
    clocks differ. They are marked if one is left that is older than these, and has no mark."""
    since = failure.at - failure.unnoticed_s
    late: list[int] = []
    unsure: list[int] = []
    is_left = False
    found = kept.newest_whole_or_none(store, keys)
    while found is not None:
        if found.begun_at > since:
            late.append(found.number)
        elif found.begun_at > since - failure.slack_s:
            unsure.append(found.number)
            is_left = False  # what was seen before is newer
        else:  # or one that was asked for, and may be of any moment
            is_left = is_left or not marks.get(found.number, Mark()).why
            if found.begun_at and (is_left or not unsure):
                break
        found = kept.next_older(store, keys, found)
    why = "it was begun when the job hung already"
    hung = dict.fromkeys(late, Mark(f"{why}: {failure.reason}", is_sure=True))
    if is_left:
        before = Mark(f"{why}, or just before: {failure.reason}", is_luck=True)
        hung |= dict.fromkeys(unsure, before)
    old = {number: marks.get(number, Mark()) for number in hung}
    return {
        number: replace(one, lost=old[number].lost)
        for number, one in hung.items()
        if not old[number].why or (one.is_sure and not old[number].is_sure)
    }
