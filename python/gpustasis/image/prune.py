# SPDX-License-Identifier: Apache-2.0
"""Remove checkpoints from a store without breaking a chain, whoever dumps or restores meanwhile.

First every candidate is locked, for itself alone: where somebody holds it, it stays. From then on
no dump can begin to build on a candidate: it asks for a lock of its own first, and looks afterwards
whether the directory is still in its place. Only then is the store read again: a dump that was
faster is in it by now, with its manifest. What anything that stays needs, stays. The rest goes, no
parent before its children: renamed first, so that it is whole or gone, and deleted then. What a
prune that was killed has renamed is a candidate like the others: a dump may have found it between
the two.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from enum import StrEnum
from pathlib import Path

from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import sync_directory
from gpustasis.image.arena import Tier, find_marker, note_over
from gpustasis.image.directory import DirectoryLock, try_exclude
from gpustasis.image.store import (
    Entry,
    Needs,
    OpenSealed,
    by_time,
    is_trash,
    read_store,
    trash_name,
)

_UNITS = {
    "s": timedelta(seconds=1),
    "m": timedelta(minutes=1),
    "h": timedelta(hours=1),
    "d": timedelta(days=1),
    "w": timedelta(weeks=1),
}
_DURATION = re.compile(r"([1-9][0-9]{0,8})([smhdw])")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """A checkpoint is kept if any of these says so; None: that rule is not there.

    last: the newest so many. within: those not older than the newest by more than this. hourly,
    daily: the newest of each of the latest so many hours or days, by the clock of the times given,
    that have any. Numbers are at least 1, so that the newest is kept whatever the rule.
    """

    last: int | None = None
    within: timedelta | None = None
    hourly: int | None = None
    daily: int | None = None

    @property
    def empty(self) -> bool:
        return self == Rules()


def parse_duration(text: str) -> timedelta:
    """Of "90s", "30m", "24h", "7d" or "2w". Raises ValueError."""
    found = _DURATION.fullmatch(text)
    if found is None:
        raise ValueError(f"{text!r} is not a number followed by one of {', '.join(_UNITS)}")
    try:
        return int(found[1]) * _UNITS[found[2]]
    except OverflowError as exc:
        raise ValueError(f"{text!r} is too long") from exc


def choose(times: Mapping[str, datetime], rules: Rules) -> dict[str, list[str]]:
    """Which names to keep, each with the rules that say so. Of two of the same time, the name that
    sorts last counts as the newer one."""
    newest_first = sorted(times, key=lambda name: (times[name], name), reverse=True)
    kept: dict[str, list[str]] = {}

    def keep(name: str, rule: str) -> None:
        kept.setdefault(name, []).append(rule)

    for name in newest_first[: rules.last or 0]:
        keep(name, "last")
    if rules.within is not None and newest_first:
        newest = times[newest_first[0]]
        for name in newest_first:
            if newest - times[name] <= rules.within:
                keep(name, "within")
    periods: tuple[tuple[str, int | None, Callable[[datetime], object]], ...] = (
        ("hourly", rules.hourly, lambda time: (time.date(), time.hour, time.utcoffset())),
        ("daily", rules.daily, lambda time: time.date()),
    )
    for rule, count, period_of in periods:
        seen: set[object] = set()
        for name in newest_first:
            period = period_of(times[name])
            if period not in seen and len(seen) < (count or 0):
                seen.add(period)
                keep(name, rule)
    return kept


class Action(StrEnum):
    """What became of an entry; IGNORED: it is no whole checkpoint of ours."""

    KEPT = "kept"
    REMOVED = "removed"
    IGNORED = "ignored"


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """reasons: why it stayed. size: bytes of its files."""

    entry: Entry
    action: Action
    reasons: tuple[str, ...]
    size: int


@dataclass(slots=True, kw_only=True)
class Outcome:
    """verdicts: oldest first. leftovers: names that a killed prune had left, deleted now.

    outside: places outside the store that links lead to; they were left alone.
    """

    verdicts: list[Verdict] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    outside: dict[str, list[Path]] = field(default_factory=dict)


def prune(
    store: Path, rules: Rules, *, dry_run: bool = False, open_sealed: OpenSealed | None = None
) -> Outcome:
    """Remove from `store` what neither the rules nor a chain keep; dry_run: only say what.

    open_sealed: None: what a sealed checkpoint is built on is told by its link alone.
    Raises CheckpointError if another prune is at work, a rule is missing, it cannot be told what
    one is built on, or something cannot be removed: all else is by then, but for what that is built
    on; ImageError if the store cannot be read. Whatever happens, each checkpoint is whole, or gone
    with nothing left that needs it.
    """
    if rules.empty:
        raise CheckpointError("prune needs a rule that says what to keep")
    with ExitStack() as held:
        if dry_run:
            entries = read_store(store, open_sealed)
            return _outcome(entries, _reasons(entries, rules))
        lock = try_exclude(store)
        if lock is None:
            raise CheckpointError(f"another prune is at work in {store}")
        held.enter_context(lock)
        before = read_store(store, open_sealed)
        locks, stays = _lock(before, set(before) - set(_reasons(before, rules)), held)
        entries = read_store(store, open_sealed)
        reasons = _reasons_after(before, entries, rules, locks.keys(), stays)
        outcome = _outcome(entries, reasons)
        for name in set(locks) & set(reasons):
            locks[name].close()
        needs = _needs_among(entries, set(entries) - set(reasons))
        problems: list[str] = []
        left: set[str] = set()
        for entry in _children_first(entries, needs):
            try:
                if entry.name not in left:
                    _remove(store.resolve(), entry)
            except CheckpointError as exc:
                problems.append(str(exc))
                left |= needs[entry.name]
            locks[entry.name].close()
        if problems:
            raise CheckpointError("; ".join(problems))
        return outcome


def _reasons(entries: Mapping[str, Entry], rules: Rules) -> dict[str, list[str]]:
    """What stays, and why: by the rules, because it is not ours to remove, or for a chain."""
    times = {
        entry.name: entry.taken
        for entry in entries.values()
        if entry.taken is not None and not _stays(entry) and not is_trash(entry.name)
    }
    kept = choose(times, rules)
    for entry in entries.values():
        if (why := _stays(entry)) and not is_trash(entry.name):
            kept[entry.name] = [why]
    return _with_chains(entries, kept)


def _stays(entry: Entry) -> str:
    """Why no rule counts it, and it is not removed; "": rules decide. One that the next boot may
    take must not be the one for which others go."""
    if not entry.incomplete and entry.tier == Tier.LOCAL:
        return "only in memory yet: it is to be drained first"
    return entry.incomplete


def _reasons_after(
    before: Mapping[str, Entry],
    entries: Mapping[str, Entry],
    rules: Rules,
    locked: AbstractSet[str],
    stays: Mapping[str, str],
) -> dict[str, list[str]]:
    """The same once the candidates are locked: only what is locked, and still the same, may go."""
    kept = {name: reasons for name, reasons in _reasons(before, rules).items() if name in entries}
    for name, entry in entries.items():
        if (why := _stays(entry)) and not is_trash(name):
            kept[name] = [why]
        elif name not in before:
            kept[name] = ["new"]
        elif name not in kept and name not in locked:
            kept[name] = [stays[name]]
        elif name not in kept and entry.identity != before[name].identity:
            kept[name] = ["changed meanwhile"]
    return _with_chains(entries, kept)


def _lock(
    entries: Mapping[str, Entry], candidates: set[str], held: ExitStack
) -> tuple[dict[str, DirectoryLock], dict[str, str]]:
    """Locks on those that nobody uses, which `held` closes; and why the others stay.

    Children come first, and what one in use is built on is not asked for: its user may be about to
    lock that as well, and must find it free.
    """
    locks: dict[str, DirectoryLock] = {}
    stays: dict[str, str] = {}
    needs = Needs(entries)
    for entry in _children_first(entries, _needs_among(entries, candidates)):
        if entry.name in stays:
            continue
        lock = _try_lock(entry.directory)
        if lock is None:
            stays[entry.name] = "in use"
            stays |= {name: f"needed by {by}" for name, by in needs.of([entry.name]).items()}
        else:
            locks[entry.name] = held.enter_context(lock)
    return locks, stays


def _try_lock(directory: Path) -> DirectoryLock | None:
    try:
        return try_exclude(directory)
    except ImageError:  # gone meanwhile, or not ours to open
        return None


def _with_chains(
    entries: Mapping[str, Entry], kept: Mapping[str, list[str]]
) -> dict[str, list[str]]:
    reasons = {name: list(why) for name, why in kept.items()}
    for name, child in Needs(entries).of(kept).items():
        why = reasons.setdefault(name, [])
        if (need := f"needed by {child}") not in why:
            why.append(need)
    return reasons


def _outcome(entries: Mapping[str, Entry], reasons: Mapping[str, list[str]]) -> Outcome:
    found = Outcome(outside=Needs(entries).outside())
    for entry in sorted(entries.values(), key=by_time):
        if is_trash(entry.name) and entry.name not in reasons:
            found.leftovers.append(entry.name)
            continue
        action = Action.KEPT if entry.name in reasons else Action.REMOVED
        found.verdicts.append(
            Verdict(
                entry=entry,
                action=Action.IGNORED if entry.incomplete else action,
                reasons=tuple(reasons.get(entry.name, ())),
                size=entry.size,
            )
        )
    return found


def _needs_among(entries: Mapping[str, Entry], names: set[str]) -> dict[str, set[str]]:
    """Of each of `names` those others of them that it needs, near and far."""
    all_needs = Needs(entries)
    return {name: set(all_needs.of([name])) & (names - {name}) for name in names}


def _children_first(entries: Mapping[str, Entry], needs: Mapping[str, set[str]]) -> Iterator[Entry]:
    """Each that `needs` names after all that need it. In a circle, which nothing but malice makes,
    some order."""
    todo = dict(needs)
    while todo:
        wanted = set().union(*todo.values())
        free = sorted(set(todo) - wanted) or sorted(todo)
        for name in free:
            del todo[name]
            yield entries[name]


def _remove(store: Path, entry: Entry) -> None:
    trash = entry.directory
    _note_over(entry.directory)
    try:
        if not is_trash(entry.name):
            trash = store / trash_name()
            os.rename(entry.directory, trash)
            sync_directory(store)
        shutil.rmtree(trash)
    except OSError as exc:
        raise CheckpointError(f"cannot remove {entry.directory}: {exc}") from exc


def _note_over(directory: Path) -> None:
    """A drain that was killed when the checkpoint was durable has left its memory: without the
    directory nobody could tell that it is needed no more."""
    with suppress(CheckpointError):
        marker = find_marker(directory)
        if marker is not None:
            note_over(directory, marker)
