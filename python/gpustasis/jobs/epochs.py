# SPDX-License-Identifier: Apache-2.0
"""Asking for a checkpoint of a whole job, and what became of it."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from gpustasis.errors import JobError
from gpustasis.jobs.lead import digest_of
from gpustasis.jobs.messages import Epoch, Phase
from gpustasis.jobs.records import (
    MAX_EPOCH,
    Keys,
    Plan,
    epoch_of,
    member_of,
    number_of,
    phase_text,
    rank_of,
    settlement_of,
)
from gpustasis.jobs.store import Entry, Put, Require, Snapshot, Store, Unreachable
from gpustasis.jobs.work import Excuse

_POLL_S = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class Standing:
    """An epoch as it is stored. records: what each rank has dumped. settled: who has done what was
    decided; problems: what went wrong with that, empty if nothing did; excuses: of those that have
    one (work.Excuse). begun_at: in seconds since 1970, of a checkpoint by the clock; 0: it is none,
    or that is not known. is_evidence: it was made of a job that had failed, to look at. is_engines:
    container engines were asked for it one by one, and what they have made is theirs. drained:
    ranks whose dump is on a disk by now, as a prune has seen (on_disk.py)."""

    number: int
    epoch: Epoch
    plan: Plan
    records: dict[int, str]
    settled: frozenset[int]
    problems: dict[int, str]
    excuses: dict[int, Excuse] = field(default_factory=dict)
    begun_at: float = 0.0
    pruned: bool = False
    is_evidence: bool = False
    is_engines: bool = False
    drained: frozenset[int] = frozenset()

    @property
    def is_whole(self) -> bool:
        """A checkpoint that is committed and not pruned, with the records that were committed."""
        return self.was_whole and not self.pruned

    @property
    def was_whole(self) -> bool:
        """The same, but it may be pruned by now."""
        return (
            self.epoch.phase is Phase.COMMITTED
            and not self.plan.restores
            and set(self.records) == set(range(self.plan.world))
            and digest_of(self.records) == self.epoch.note
        )


def begin(
    store: Store,
    keys: Keys,
    plan: Plan,
    *,
    number: int = 0,
    requires: Sequence[Require] = (),
    puts: Sequence[Put] = (),
) -> int:
    """A new epoch; its number. There is never a second one that is not decided. number: that it
    has to have; 0: it does not matter. requires, puts: what else must hold, and is stored with it.

    Raises JobError if there is one; StoreError. After Unreachable nobody knows whether it has
    begun; then it comes to its end by its deadlines.
    """
    snapshot = store.read(keys.newest)
    entry = snapshot.entries.get(keys.newest)
    last = number_of(keys.newest, entry)
    if last >= MAX_EPOCH:
        raise JobError(f"job {keys.job}: epoch {last} is the last that there can be")
    needed = [*requires, Require(keys.newest, entry.revision if entry else 0)]
    if last:
        before, _ = phase(store, keys, last)
        if not before.phase.is_final:
            raise JobError(
                f"job {keys.job}: epoch {last} is in phase {before.phase} and not decided"
            )
        needed.append(Require(keys.phase(last), before.revision))
    if number not in {0, last + 1}:
        raise JobError(f"job {keys.job}: epoch {last + 1} is the next one, not {number}")
    number = last + 1
    needed.append(Require(keys.phase(number), 0))
    if plan.restores:
        needed.append(Require(keys.pruned(plan.restores), 0))
    written = [Put(keys.newest, str(number)), Put(keys.phase(number), phase_text(plan, Phase.LOOK))]
    if not store.write(needed, [*written, *puts]).applied:
        raise JobError(f"job {keys.job}: somebody else has just begun epoch {number}")
    return number


def phase(store: Store, keys: Keys, number: int) -> tuple[Epoch, Plan]:
    """Of an epoch, without reading its ranks. Raises JobError if there is none; StoreError."""
    key = keys.phase(number)
    snapshot = store.read(key)
    if key not in snapshot.entries:
        raise JobError(f"job {keys.job}: there is no epoch {number}")
    return epoch_of(key, snapshot.entries[key])


def standing(store: Store, keys: Keys, number: int) -> Standing:
    """Raises JobError if there is no such epoch; StoreError."""
    return standing_of(keys, number, store.read(keys.epoch(number)))


def standing_of(keys: Keys, number: int, snapshot: Snapshot) -> Standing:
    """The same of what was read. Raises JobError."""
    key = keys.phase(number)
    if key not in snapshot.entries:
        raise JobError(f"job {keys.job}: there is no epoch {number}")
    epoch, plan = epoch_of(key, snapshot.entries[key])
    records: dict[int, str] = {}
    problems: dict[int, str] = {}
    excuses: dict[int, Excuse] = {}
    drained: set[int] = set()
    for name, entry in snapshot.entries.items():
        rank = rank_of(name, plan.world)
        if rank is not None and name == keys.record(number, rank):
            records[rank] = entry.value
        elif rank is not None and name == keys.settled(number, rank):
            problems[rank], excuse = settlement_of(name, entry)
            if excuse:
                excuses[rank] = excuse
        elif rank is not None and name == keys.drained(number, rank):
            drained.add(rank)
    return Standing(
        number=number,
        epoch=epoch,
        plan=plan,
        records=records,
        settled=frozenset(problems),
        problems=problems,
        excuses=excuses,
        begun_at=_seconds(snapshot.entries.get(keys.in_between(number))),
        pruned=keys.pruned(number) in snapshot.entries,
        is_evidence=keys.evidence(number) in snapshot.entries,
        is_engines=keys.awaited(number) in snapshot.entries,
        drained=frozenset(drained),
    )


def _seconds(entry: Entry | None) -> float:
    try:
        found = 0.0 if entry is None else float(entry.value)
    except ValueError:
        return 0.0
    return found if math.isfinite(found) else 0.0


def steps(store: Store, keys: Keys, number: int, world: int) -> dict[int, str]:
    """How far each rank says that it has come, of those whose lease lives. Raises JobError."""
    wanted = {keys.member(number, rank): rank for rank in range(world)}
    found = store.read(f"{keys.epoch(number)}members/").entries
    return {wanted[k]: str(member_of(k, entry)[0]) for k, entry in found.items() if k in wanted}


def abort(store: Store, keys: Keys, number: int, reason: str) -> Epoch:
    """Abort an epoch that is not decided; how it is decided. Raises JobError, StoreError."""
    while True:
        epoch, plan = phase(store, keys, number)
        if epoch.phase.is_final:
            return epoch
        put = Put(keys.phase(number), phase_text(plan, Phase.ABORTED, reason))
        store.write([Require(keys.phase(number), epoch.revision)], [put])


def decision(store: Store, keys: Keys, number: int, timeout_s: float) -> Epoch:
    """How an epoch is decided; after `timeout_s` it is aborted, if that is possible. Raises
    JobError, StoreError; Unreachable: only the store knows."""
    deadline = time.monotonic() + timeout_s
    lost: Unreachable | None = None
    while time.monotonic() < deadline:
        try:
            epoch, _ = phase(store, keys, number)
        except Unreachable as exc:
            lost = exc
        else:
            if epoch.phase.is_final:
                return epoch
            lost = None
        time.sleep(_POLL_S)
    if lost is not None:
        raise lost
    return abort(store, keys, number, f"not decided within {timeout_s:g} s")
