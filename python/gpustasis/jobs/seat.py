# SPDX-License-Identifier: Apache-2.0
"""A rank's place in an epoch as it is in the store: what is read there, written, and watched."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import epochs
from gpustasis.jobs.lead import LEAD, Roll, next_move
from gpustasis.jobs.messages import (
    Dumped,
    Epoch,
    Join,
    Move,
    Phase,
    Report,
    Settle,
    Step,
    Tick,
    Write,
)
from gpustasis.jobs.records import (
    Keys,
    Plan,
    epoch_of,
    member_of,
    member_text,
    number_of,
    phase_text,
    rank_of,
    settled_text,
)
from gpustasis.jobs.store import Change, Entry, LeaseGone, Put, Require, Snapshot, Store, Watch

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What the store says at one revision: of the epoch, and of this rank in it. lead_is_there: the
    lead's lease lives, or it has not joined yet."""

    revision: int
    epoch: Epoch
    world: int
    joined: bool = False
    dumped: bool = False
    settled: bool = False
    is_there: bool = False
    lead_is_there: bool = True


class Seat:
    """keeper: a name of whoever sits there, unlike every other one. was_told: a watch has told
    something since this was set to False. Methods raise StoreError, and
    JobError if what is stored cannot be."""

    def __init__(self, store: Store, keys: Keys, number: int, rank: int, keeper: str) -> None:
        self.number = number
        self.rank = rank
        self.name = f"job {keys.job}, epoch {number}, rank {rank}"
        self._store = store
        self._keys = keys
        self._keeper = keeper
        self._plan = Plan(world=1, leave_running=False)
        self._last: Epoch | None = None
        self._lease = 0
        self._has_lease = False
        self._lock = threading.Lock()  # of what the lead has read
        self._roll = Roll(1)
        self._read_at = 0
        self._noted_at = 0
        self.was_told = False

    def take(self, ttl_s: int) -> Found:
        """Have a lease that lasts, and read how things are."""
        try:
            self.keep()
        except LeaseGone:
            self.lose_lease()
        if not self._has_lease:
            self._lease = self._store.grant(ttl_s)
            self._has_lease = True
        return self.read()

    def leave(self) -> None:
        """End the lease, if the store can be told; if not, it ends by itself."""
        if self._has_lease:
            self._has_lease = False
            with suppress(StoreError):
                self._store.revoke(self._lease)

    def lose_lease(self) -> None:
        """It is gone."""
        self._has_lease = False

    def keep(self) -> None:
        """Keep the lease, if there is one. Raises LeaseGone."""
        if self._has_lease:
            self._store.keep(self._lease)

    @property
    def has_lease(self) -> bool:
        return self._has_lease

    def read(self) -> Found:
        """How things are; the lead reads what all ranks say."""
        keys, number, rank = self._keys, self.number, self.rank
        wanted = [keys.phase(number), keys.member(number, rank), keys.member(number, LEAD)]
        wanted += [keys.record(number, rank), keys.settled(number, rank), keys.rank(rank)]
        if rank == LEAD:
            wanted = [keys.epoch(number), keys.rank(rank)]
        return self._found(self._store.read(*wanted))

    def trouble(self, found: Found) -> str:
        """Why the epoch cannot go on, by what was read."""
        if found.joined and not found.dumped and not found.settled and not found.is_there:
            return f"rank {self.rank} lost its lease"
        if found.epoch.phase is not Phase.LOOK and not found.lead_is_there:
            return f"the lead, rank {LEAD}, lost its lease"
        return ""

    def watches(self, after: int) -> list[Watch]:
        """On what matters to this rank. That the lead's lease is gone is read in time: a watch of
        it would tell every rank of each step of the lead's."""
        key = self._keys.epoch(self.number) if self.rank == LEAD else self._keys.phase(self.number)
        return [self._store.watch(key, after)]

    def events(self, change: Change) -> Iterator[Found | Tick]:
        """What a change that was watched means."""
        self.was_told = True
        try:
            if change.key == self._keys.phase(self.number):
                if change.entry is not None:
                    epoch, plan = epoch_of(change.key, change.entry)
                    if self._last is None or self._last.revision < epoch.revision:
                        self._last = epoch
                    yield Found(revision=change.revision, epoch=epoch, world=plan.world)
            elif self.rank == LEAD:
                yield from self._noted(change)
        except JobError as exc:  # the next reading says the same, to those who must know
            log.info("%s: %s", self.name, exc)

    def next_move(self, epoch: Epoch, world: int) -> Move | None:
        """What the lead asks for, by what it has read."""
        with self._lock:
            return next_move(epoch, self._roll) if self._roll.world == world else None

    def write(self, write: Write) -> tuple[bool, Epoch]:
        """Whether it was applied, and the epoch then. Raises LeaseGone."""
        keys, number, rank = self._keys, self.number, self.rank
        member, phase = keys.member(number, rank), keys.phase(number)
        requires = [] if isinstance(write, Settle) else [Require(phase, write.expect)]
        match write:
            case Join():
                requires.append(Require(member, 0))
                # What an older life of the store has left would stand for what is to come.
                requires.append(Require(keys.record(number, rank), 0))
                requires.append(Require(keys.settled(number, rank), 0))
                puts = [self._member(Step.JOINED), Put(keys.rank(rank), str(number))]
            case Report(_, step):
                puts = [self._member(step)]
            case Dumped(_, record):
                puts = [Put(keys.record(number, rank), record)]
            case Move(_, to, note):
                puts = [Put(phase, phase_text(self._plan, to, note))]
            case Settle(problem, excuse):
                puts = [Put(keys.settled(number, rank), settled_text(problem, excuse))]
        last = self._last  # it goes on as soon as this is written
        answer = self._store.write(requires, puts)
        if answer.applied and last is not None:
            # The epoch is what was required, or what was put there.
            if isinstance(write, Move):
                plan = self._plan
                self._last = Epoch(
                    write.phase, answer.revision, plan.leave_running, write.note, plan.restores
                )
                return True, self._last
            if isinstance(write, Settle) or last.revision == write.expect:
                return True, last
        applied = answer.applied
        snapshot = self._store.read(phase, member)
        epoch = self._epoch(snapshot)
        if isinstance(write, Join) and not applied and member in snapshot.entries:
            # It may have been applied before, when nobody answered.
            applied = member_of(member, snapshot.entries[member])[1] == self._keeper
        return applied, epoch

    def refuse(self, reason: str) -> None:
        """The epoch is not one that this rank can be in."""
        epochs.abort(self._store, self._keys, self.number, reason)

    def _member(self, step: Step) -> Put:
        if not self._has_lease:
            raise LeaseGone(f"{self.name}: its lease has expired")
        key = self._keys.member(self.number, self.rank)
        return Put(key, member_text(step, self._keeper), self._lease)

    def _epoch(self, snapshot: Snapshot) -> Epoch:
        key = self._keys.phase(self.number)
        if key not in snapshot.entries:
            raise JobError(f"{self.name}: {key} is not there")
        self._last, self._plan = epoch_of(key, snapshot.entries[key])
        return self._last

    def _note_all(self, snapshot: Snapshot) -> None:
        with self._lock:
            if snapshot.revision < self._noted_at:  # the watch has said more in the meantime
                return
            self._roll = Roll(self._plan.world)
            self._read_at = snapshot.revision
            for key, entry in snapshot.entries.items():
                self._note(key, entry)

    def _noted(self, change: Change) -> Iterator[Tick]:
        """A change after what was read; of an older one nothing is left to say."""
        with self._lock:
            if change.revision > self._read_at:
                self._note(change.key, change.entry)
                self._noted_at = max(self._noted_at, change.revision)
        yield Tick()

    def _note(self, key: str, entry: Entry | None) -> None:
        rank = rank_of(key, self._plan.world)
        if rank is None:
            return
        if key == self._keys.member(self.number, rank):
            self._roll.note_step(rank, None)
            if entry is not None:
                self._roll.note_step(rank, member_of(key, entry)[0])
        elif key == self._keys.record(self.number, rank) and entry is not None:
            self._roll.note_record(rank, entry.value)

    def _found(self, snapshot: Snapshot) -> Found:
        keys, number, rank = self._keys, self.number, self.rank
        entries = snapshot.entries
        epoch = self._epoch(snapshot)
        if rank == LEAD:
            self._note_all(snapshot)
        mine = entries.get(keys.rank(rank))
        member = entries.get(keys.member(number, rank))
        return Found(
            revision=snapshot.revision,
            epoch=epoch,
            world=self._plan.world,
            joined=number_of(keys.rank(rank), mine) == number,
            dumped=keys.record(number, rank) in entries,
            settled=keys.settled(number, rank) in entries,
            is_there=member is not None
            and member_of(keys.member(number, rank), member)[1] == self._keeper,
            lead_is_there=keys.member(number, LEAD) in entries,
        )
