# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of jobs that a store knows: which there are, whether they are whole, and which
of them go."""

from __future__ import annotations

import logging
import os
import re
import shutil
import socket
from collections.abc import Callable, Collection, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.errors import CheckpointError, ImageError, JobError
from gpustasis.files import changeable_by_others
from gpustasis.image.checkpoint import is_sealed
from gpustasis.image.directory import try_exclude
from gpustasis.jobs import epochs, neighbour, verified
from gpustasis.jobs.dumps import DumpRecord, named_in, problems_of, record_of
from gpustasis.jobs.epochs import Standing
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.on_disk import on_disk
from gpustasis.jobs.owner import owner_of
from gpustasis.jobs.records import TOP, Keys, number_of
from gpustasis.jobs.store import Entry, Put, Require, Store
from gpustasis.jobs.verified import Mark, tell_once
from gpustasis.peers.copies import FETCHED

log = logging.getLogger(__name__)

_NEWEST = re.compile(re.escape(TOP) + r"/([^/]+)/newest")


@dataclass(frozen=True, slots=True)
class Checked:
    """One rank's dump. problems: None: it is on another host, and was not looked at."""

    rank: int
    record: DumpRecord
    problems: list[str] | None


@dataclass(frozen=True, slots=True)
class Pruned:
    """epoch: whose dumps go. directories: that were on this host, and are removed."""

    epoch: int
    directories: list[str]


def jobs(store: Store) -> list[str]:
    """Names of all jobs that have ever had an epoch. Raises StoreError."""
    found = store.read(f"{TOP}/").entries
    return sorted(match[1] for key in found if (match := _NEWEST.fullmatch(key)))


def all_epochs(store: Store, keys: Keys) -> list[Standing]:
    """Oldest first. Raises JobError if there is none, or what is stored cannot be; StoreError."""
    newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
    if not newest:
        raise JobError(
            f"job {keys.job}: the store knows none of this name; `gpustasis job list` shows those "
            "that it knows"
        )
    return [epochs.standing(store, keys, number) for number in range(1, newest + 1)]


def newest_whole(store: Store, keys: Keys) -> Standing:
    """Raises JobError if there is none. What was kept as evidence is none that a job goes on
    from."""
    found = newest_whole_or_none(store, keys)
    if found is None:
        all_epochs(store, keys)  # which says so if the job is not known
        raise JobError(f"job {keys.job}: no epoch is a whole checkpoint")
    return found


def newest_whole_or_none(store: Store, keys: Keys) -> Standing | None:
    """As newest_whole."""
    newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
    for number in range(newest, 0, -1):
        found = epochs.standing(store, keys, number)
        if found.is_whole and not found.is_evidence:
            return found
    return None


def ended_at(store: Store, keys: Keys, world: int) -> int:
    """The newest epoch by which all ranks of a job that is not recovered have ended well; 0: they
    have not. Raises JobError, StoreError."""
    return min(numbers_of(store, keys, "ended", world))


def numbers_of(store: Store, keys: Keys, kind: str, world: int) -> list[int]:
    """Of all ranks, "ended" or "waiting"; 0: it has said nothing. Raises JobError, StoreError."""
    found = store.read(keys.said_by(kind)).entries
    names = [keys.said_by(kind, rank) for rank in range(world)]
    return [number_of(name, found.get(name)) for name in names]


def find_epoch(store: Store, keys: Keys, number: int | None) -> Standing:
    """A whole checkpoint: that of this number, or the newest. Raises JobError."""
    if number is None:
        return newest_whole(store, keys)
    found = epochs.standing(store, keys, number)
    if not found.is_whole:
        raise JobError(f"job {keys.job}: epoch {number} is no whole checkpoint: {state_of(found)}")
    return found


def next_older(store: Store, keys: Keys, found: Standing) -> Standing | None:
    """The whole checkpoint of as many ranks before this one, as newest_whole; None: there is none.
    Raises JobError, StoreError."""
    for number in range(found.number - 1, 0, -1):
        older = epochs.standing(store, keys, number)
        if older.is_whole and not older.is_evidence and older.plan.world == found.plan.world:
            return older
    return None


def next_to_try(store: Store, keys: Keys, found: Standing) -> Standing | None:
    """After a restore of this one that was not verified: the next older one; the same again if
    nothing is held against it, for a rank had ended since its keeper was told to. None: there is
    none. Raises JobError, StoreError."""
    if found.number not in verified.marks(store, keys, [found.number]):
        return found
    return next_older(store, keys, found)


def slowest_dump(store: Store, keys: Keys) -> tuple[int, float] | None:
    """The epoch and the seconds of the slowest dump of the newest whole checkpoints, back to where
    each rank has a full one; None: there is no checkpoint. Raises JobError, StoreError."""
    newest = newest_whole_or_none(store, keys)
    if newest is None:
        return None
    slowest = (0, 0.0)
    full: set[int] = set()
    for number in range(newest.number, 0, -1):
        found = epochs.standing(store, keys, number)
        if not found.was_whole or found.is_evidence or found.plan.world != newest.plan.world:
            continue
        records = records_of(found)
        slowest = max(slowest, (number, max(one.dump_ms for one in records) / 1000), key=_seconds)
        full.update(rank for rank, one in enumerate(records) if not one.parent)
        if len(full) == len(records):
            break
    return slowest


def _seconds(one: tuple[int, float]) -> float:
    return one[1]


def marks(
    store: Store, keys: Keys, told: Callable[[str], object] | None = tell_once
) -> dict[int, Mark]:
    """Of all checkpoints, as verified.marks. Raises JobError, StoreError."""
    newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
    return verified.marks(store, keys, range(1, newest + 1), told)


def all_marks(store: Store, keys: Keys) -> dict[int, Mark]:
    """Of all checkpoints, as verified.all_marks. Raises JobError, StoreError."""
    newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
    return verified.all_marks(store, keys, range(1, newest + 1))


def unverified(store: Store, keys: Keys) -> dict[int, str]:
    """Epochs that did not bring the job back when they were restored last, or will not: why, for
    people. Raises JobError, also if a mark cannot be used; StoreError."""
    found = marks(store, keys, told=None)
    return {number: f"not verified: {mark.why}" for number, mark in found.items()}


def state_of(found: Standing) -> str:
    """In a word or two."""
    if found.pruned:
        return "pruned"
    if found.epoch.phase is not Phase.COMMITTED or found.plan.restores or found.is_whole:
        return str(found.epoch.phase)
    return "damaged: its records are not those that were committed"


def kind_of(found: Standing) -> str:
    """In a word."""
    if found.plan.restores:
        return "restore"
    return "evidence" if found.is_evidence else "checkpoint"


def records_of(found: Standing) -> list[DumpRecord]:
    """Of all ranks, in their order. Raises JobError."""
    return [
        record_of(text, f"epoch {found.number}, rank {rank}")
        for rank, text in sorted(found.records.items())
    ]


def verify(found: Standing, threads: int = 0) -> list[Checked]:
    """Look at every byte of what is on this host, or shared with it. Raises JobError."""
    checked = []
    for rank, record in enumerate(records_of(found)):
        is_here = record.host == socket.gethostname() or Path(record.directory).is_dir()
        problems = problems_of(record, threads) if is_here else None
        checked.append(Checked(rank, record, problems))
    return checked


def prune(store: Store, keys: Keys, keep_last: int) -> list[Pruned]:
    """Remove the dumps of all but the newest `keep_last` whole checkpoints, as far as they are on
    this host; and of those that were pruned before, if they are there. The newest whole one stays;
    so do dumps that those of one that stays are built on, for as long as that is so. One that did
    not bring the job back when it was restored last, or has still to, counts for none that is kept;
    nor does one that may be in the memory of two hosts alone: with both it is lost.

    Raises JobError if an epoch is under way, or something cannot be removed; StoreError.
    """
    if keep_last < 1:
        raise JobError("the newest whole checkpoint always stays: keep at least 1")
    newest = store.read(keys.newest).entries.get(keys.newest)  # first: what begins later is seen
    found = all_epochs(store, keys)
    last = found[-1]
    if not last.epoch.phase.is_final:
        raise JobError(f"job {keys.job}: epoch {last.number} is not decided; prune after it")
    whole = [one for one in found if one.is_whole and not one.is_evidence]
    wrong = marks(store, keys, told=None).keys() | _not_back_yet(found)
    good = [one for one in reversed(whole) if one.number not in wrong]
    counted = on_disk(store, keys, good, keep_last)
    oldest = counted[-1] if len(counted) == keep_last else 0  # of those that stay
    stays = [one for one in found if one.is_whole and (one.is_evidence or one.number >= oldest)]
    needed = _needs_of(stays, found)
    goes = [one.number for one in whole if one.number < oldest]
    _mark(store, keys, newest, goes)
    done = []
    problems: list[str] = []  # the others go all the same
    for one in reversed(found):  # in memory, what another is built on is not given up
        if not one.pruned and one.number not in goes:
            continue
        if one.plan.restores or one.epoch.phase is not Phase.COMMITTED:
            continue
        removed = []
        for record in () if one.is_engines else records_of(one):
            if record.id and record.id in needed:
                continue
            try:
                removed += _remove(record, one.number, keys.job, needed)
            except JobError as exc:
                problems.append(str(exc))
        if removed or not one.pruned:
            done.append(Pruned(one.number, removed))
    if problems:
        raise JobError("; ".join(reversed(problems)))
    return done[::-1]


def _not_back_yet(found: list[Standing]) -> set[int]:
    """What was restored last, while not all ranks have said that they are back: an older one may be
    needed in its place."""
    done = [one for one in found if one.epoch.phase is Phase.COMMITTED]
    if not done or not done[-1].plan.restores:
        return set()
    last = done[-1]
    are_back = len(last.settled) == last.plan.world and not any(last.problems.values())
    return set() if are_back else {last.plan.restores}


def _mark(store: Store, keys: Keys, newest: Entry | None, numbers: list[int]) -> None:
    """Have all of these pruned before anything is removed: nobody has begun to restore one of them,
    or to build on it, since all were read, and nobody will. newest: as it was read before them.
    Another prune may have marked some by now. Raises JobError, StoreError."""
    revision = newest.revision if newest else 0
    has_begun = JobError(f"job {keys.job}: an epoch has begun meanwhile; prune after it")
    for number in numbers:
        key = keys.pruned(number)
        requires = [Require(keys.newest, revision), Require(key, 0)]
        is_marked = store.write(requires, [Put(key, "1")]).applied
        if not is_marked and key not in store.read(key).entries:
            raise has_begun
    # Also where nothing was to be marked: epochs are read one by one, and may be of two moments.
    now = store.read(keys.newest).entries.get(keys.newest)
    if (now.revision if now else 0) != revision:
        raise has_begun


def _needs_of(these: Iterable[Standing], among: Iterable[Standing]) -> set[str]:
    """Ids of the dumps that theirs are built on, and so on; those of engines are the engines'.
    Raises JobError if that cannot be told."""
    parents = {
        record.id: record.parent for one in among if one.was_whole for record in records_of(one)
    }
    needed: set[str] = set()
    ours = [one for one in these if not one.is_engines]
    todo = [(one.number, record.parent) for one in ours for record in records_of(one)]
    while todo:
        number, parent = todo.pop()
        if not parent or parent in needed:
            continue
        if parent not in parents:
            raise JobError(
                f"epoch {number} is built on {parent}, of which the store has no record as it was "
                "committed: nothing is pruned"
            )
        needed.add(parent)
        todo.append((number, parents[parent]))
    return needed


def _remove(record: DumpRecord, number: int, job: str, needed: Collection[str]) -> list[str]:
    """What was removed: the dump, and what was fetched with it and is not needed any more; empty:
    nothing was there, or it is another's. needed: ids of what those that stay are built on. Raises
    JobError."""
    place = Path(record.directory)
    if not place.is_dir() or place.is_symlink():
        return []
    if record.host != socket.gethostname() and not (place / FETCHED).is_file():
        return []
    # The store is others' as well: only what is named as keepers name it, and holds a dump.
    is_dump = not os.listdir(place) or (place / INVENTORY_NAME).is_file()
    if place.name != f"epoch-{number:08d}" or not is_dump:
        raise JobError(f"{place} is not named as a dump of epoch {number}, or is none: left alone")
    wrong = next(changeable_by_others(str(place), owners=(0, os.geteuid())), None)
    if wrong is not None:  # while it is removed, it may become a link to somewhere else
        raise JobError(f"{place} is left alone: {wrong}, and keepers dump to no such place")
    try:
        lock = try_exclude(place)
        if lock is None:  # by who restores it, builds on it or fills memory from it
            raise JobError(f"{place} is in use, and left alone: prune again later")
    except ImageError:  # a network's file system has no such locks: nobody's is in the way there
        lock = None
    with lock or nullcontext():
        if because := _why_not_its(record, job):
            tell_once(f"{place} is left alone by the prune of epoch {number}, job {job}: {because}")
            return []
        removed = _remove_all(place, needed)
    if record.is_copied:
        _forget_copy(record)
    return removed


def _why_not_its(record: DumpRecord, job: str) -> str:
    """Why what is in the record's directory may be another's; empty: it is the record's dump, or
    what is left of it. The directory's name says nothing: other jobs count epochs as well, and this
    one's dump may have gone long ago. Raises JobError."""
    place = Path(record.directory)
    try:
        found = named_in(place)
        is_another = not found and record.id != "" and is_sealed(place)
    except ImageError as exc:
        raise JobError(f"{place} is left alone: {exc}") from exc
    if found == {record.id}:
        return ""
    if found or is_another:
        return f"what is there is another checkpoint: {', '.join(sorted(found)) or 'a sealed one'}"
    # Nothing there says what it is: in a directory of this job's own it is no other's.
    owner = owner_of(place.parent)
    if owner == job:
        return ""
    if owner:
        return f"nothing says that it is of job {job}, and the directory belongs to job {owner}"
    if record.id or not os.listdir(place):  # a dump may be about to begin in an empty one
        return f"nothing says that it is of job {job}"
    return ""


def _forget_copy(record: DumpRecord) -> None:
    """The neighbour may have removed it long ago: newer ones take its place."""
    try:
        neighbour.forget(record.peer, record.key)
    except CheckpointError as exc:
        log.info(
            "%s was pruned, and its copy is left to %s: %s", record.directory, record.peer, exc
        )


def _remove_all(place: Path, needed: Collection[str]) -> list[str]:
    try:
        neighbour.give_up(place)
        fetched = neighbour.fetched_below(place)
        # Last, so that what is left of a prune that was killed is known as a dump.
        for name in sorted(os.listdir(place), key=lambda one: (one == INVENTORY_NAME, one)):
            part = place / name
            if part.is_dir() and not part.is_symlink():
                shutil.rmtree(part)
            else:
                part.unlink()
        place.rmdir()
        return [str(place), *map(str, neighbour.remove_fetched(fetched, needed))]
    except (OSError, CheckpointError) as exc:
        raise JobError(f"cannot remove {place}: {getattr(exc, 'strerror', exc)}") from exc
