# SPDX-License-Identifier: Apache-2.0
"""One rank's keeper: takes part in the epochs of its job, and does with the rank's tasks what the
protocol says.

A keeper that ends, however it ends, leaves the tasks as they are. The next one of the same rank
asks the store what was decided and does it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import epochs
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import (
    Action,
    Do,
    Ended,
    Epoch,
    Event,
    Join,
    Limits,
    Phase,
    Place,
    Rank,
    Report,
    Result,
    Seen,
    Stop,
    StoreBack,
    StoreLost,
    Tick,
    Trouble,
    Write,
    Written,
)
from gpustasis.jobs.protocol import advance, returned
from gpustasis.jobs.records import Keys, number_of, storable
from gpustasis.jobs.seat import Found, Seat
from gpustasis.jobs.store import LeaseGone, Store, Unreachable, Watch, WatchLost

log = logging.getLogger(__name__)

_SLICE_S = 0.2  # how often a loop looks whether it is to end
_AGAIN_S = 0.2  # before something is asked again that the store did not answer


class Work(Protocol):
    """What can be done with a rank's tasks (messages.Action says what each is for). Each raises an
    exception with its reason; release and finish do only what is still to be done."""

    def look(self) -> None: ...

    def lock_cuda(self) -> None: ...

    def lock_network(self) -> None: ...

    def dump(self, number: int) -> str:
        """Epoch `number`. The record, once the dump is durable; the tasks stand still then, and
        until release or finish, also if the keeper is gone."""

    def release(self) -> None: ...

    def finish(self, *, leave_running: bool) -> None: ...

    def stop(self) -> None:
        """Another thread's call: what is being done is to end early, if it can."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """limits: of the phases. ttl_s: how long the others wait for a rank that says nothing. store_s:
    how long the store may be away before a rank acts without it, if it may."""

    limits: Limits = field(default_factory=Limits)
    ttl_s: int = 10
    store_s: float = 8.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an epoch ended for this rank. problem: what went wrong with doing what was decided."""

    number: int
    epoch: Epoch
    problem: str


class Keeper:
    """Of one rank. There may be one at a time; whoever starts keepers sees to that."""

    def __init__(
        self, store: Store, keys: Keys, rank: int, world: int, work: Work, settings: Settings
    ) -> None:
        if not 0 <= rank < world:
            raise JobError(f"rank {rank}: must be 0 to {world - 1}")
        self._store = store
        self._keys = keys
        self._rank = rank
        self._world = world
        self._work = work
        self._settings = settings
        self._name = uuid.uuid4().hex

    def take_part(self, is_over: Callable[[], bool]) -> Outcome | None:
        """Do what an epoch that the rank was in still asks for; if there is none, wait for a new
        one and take part in it. None: is_over has become true before there was one.

        Raises JobError if what is stored cannot be, or another process is this rank; the tasks are
        left as they are then.
        """
        number = self._find(is_over)
        if number is None:
            return None
        attendance = _Attendance(
            Seat(self._store, self._keys, number, self._rank, self._name),
            self._world,
            self._work,
            self._settings,
        )
        try:
            return attendance.run()
        finally:
            attendance.close()

    def _find(self, is_over: Callable[[], bool]) -> int | None:
        keys = self._keys
        while not is_over():
            try:
                found = self._store.read(keys.newest, keys.rank(self._rank))
                joined = number_of(keys.rank(self._rank), found.entries.get(keys.rank(self._rank)))
                newest = number_of(keys.newest, found.entries.get(keys.newest))
                if joined and self._is_open(joined):
                    return joined
                if newest > joined and self._is_new(newest):
                    return newest
                watch = self._store.watch(keys.newest, found.revision)
                try:
                    while not is_over() and not watch.wait(_SLICE_S):
                        pass
                finally:
                    watch.close()
            except (Unreachable, WatchLost) as exc:
                log.info("rank %d waits for the store: %s", self._rank, exc)
                time.sleep(_AGAIN_S)
        return None

    def _is_open(self, number: int) -> bool:
        settled = self._keys.settled(number, self._rank)
        return settled not in self._store.read(settled).entries

    def _is_new(self, number: int) -> bool:
        return epochs.phase(self._store, self._keys, number)[0].phase is Phase.LOOK


@dataclass(frozen=True, slots=True)
class _Lost:
    """A watch says nothing any more."""

    watch: Watch


class _Attendance:
    """One epoch, one rank. Events come in through one queue; the store is spoken to, and the state
    machine advanced, by one thread."""

    def __init__(self, seat: Seat, world: int, work: Work, settings: Settings) -> None:
        self._seat = seat
        self._world = world
        self._work = work
        self._settings = settings
        self._me = Rank()
        self._events: queue.SimpleQueue[Event | Found | _Lost] = queue.SimpleQueue()
        self._pending: dict[type, Write] = {}
        self._lead_asks: Write | None = None
        self._watching: list[tuple[Watch, threading.Thread]] = []
        self._beaten = -1e9
        self._contact = time.monotonic()

    def run(self) -> Outcome:
        """Until the rank has done what was decided."""
        self._begin()
        while not self._is_done():
            self._exchange()
            try:
                event = self._events.get(timeout=self._pause())
            except queue.Empty:
                event = Tick()
            self._take(event)
            self._happens(Tick())
        if self._me.place is Place.BROKEN:
            raise JobError(f"{self._seat.name}: {self._me.problem}; its tasks are left as they are")
        epoch = self._me.epoch
        assert epoch is not None
        if self._me.place is Place.OVER and not epoch.phase.is_final:
            raise JobError(f"{self._seat.name}: {self._me.problem}")
        return Outcome(self._seat.number, epoch, self._me.problem)

    def close(self) -> None:
        """The rank's lease ends with it."""
        self._unwatch()
        self._seat.leave()

    def _is_done(self) -> bool:
        epoch, place = self._me.epoch, self._me.place
        if place is Place.OUT:
            return epoch is not None and epoch.phase.is_final
        return place in {Place.OVER, Place.BROKEN}

    # What happens.

    def _begin(self) -> None:
        """Read what the store says of the rank. Until that has answered nothing is done."""
        while True:
            try:
                found = self._seat.take(self._settings.ttl_s)
                if found.world != self._world:
                    self._seat.refuse(f"rank {self._seat.rank} is one of {self._world} ranks")
                self._watch_all(found.revision)
                break
            except (StoreError, WatchLost) as exc:
                log.info("%s waits for the store: %s", self._seat.name, exc)
                self._unwatch()
                time.sleep(_AGAIN_S)
        self._contact = self._beaten = now = time.monotonic()
        self._after(
            returned(
                self._settings.limits,
                found.epoch,
                joined=found.joined,
                dumped=found.dumped,
                settled=found.settled,
                now=now,
            )
        )
        self._led()

    def _take(self, event: Event | Found | _Lost) -> None:
        match event:
            case Found():
                self._happens(Seen(event.epoch))
                self._led()
            case _Lost(watch):
                if any(watch is one for one, _ in self._watching):
                    self._beaten = -1e9  # read, and watch from there
                    self._unwatch()
            case _:
                self._happens(event)

    def _happens(self, event: Event) -> None:
        self._after(advance(self._settings.limits, self._me, event, time.monotonic()))

    def _after(self, result: Result) -> None:
        before = self._me
        self._me, outputs = result
        if self._me.place is not before.place or self._me.action is not before.action:
            log.info("%s is %s %s", self._seat.name, self._me.place, self._me.action or "")
        for output in outputs:
            match output:
                case Do(action, leave_running):
                    self._start(action, leave_running=leave_running)
                case Stop():
                    self._work.stop()
                case _:
                    self._pending[type(output)] = output
        self._led()

    def _start(self, action: Action, *, leave_running: bool) -> None:
        work = self._work
        calls: dict[Action, Callable[[], str | None]] = {
            Action.LOOK: work.look,
            Action.LOCK_CUDA: work.lock_cuda,
            Action.LOCK_NETWORK: work.lock_network,
            Action.DUMP: lambda: work.dump(self._seat.number),
            Action.RELEASE: work.release,
            Action.FINISH: lambda: work.finish(leave_running=leave_running),
        }

        def act() -> None:
            try:
                ended = Ended(action, storable(calls[action]() or ""))
            except Exception as exc:  # whatever it is, it is this rank's no
                log.info("%s: %s failed", self._seat.name, action, exc_info=True)
                ended = Ended(action, problem=str(exc) or type(exc).__name__)
            self._events.put(ended)

        threading.Thread(target=act, daemon=True, name=f"{action}").start()

    def _led(self) -> None:
        """The lead asks for what follows from what it has read."""
        if self._seat.rank != LEAD or self._me.epoch is None or self._me.aborting:
            return
        self._lead_asks = self._seat.next_move(self._me.epoch, self._world)

    # What the store is told and asked.

    def _exchange(self) -> None:
        """Tell the store what it has to know; and now and then, ask it how things are."""
        try:
            due = time.monotonic() >= self._beaten + self._settings.ttl_s / 4
            if due or not self._me.reachable:
                self._beat()
            while self._me.reachable and (write := self._next_write()) is not None:
                self._say(write)
        except LeaseGone as exc:
            self._pending.pop(Join, None)
            self._pending.pop(Report, None)
            self._contact = time.monotonic()
            self._seat.lose_lease()
            if not self._me.bound:  # else its record stands, and nobody needs the lease
                self._happens(Trouble(str(exc)))
        except (StoreError, JobError) as exc:
            log.info("%s: %s", self._seat.name, exc)
            self._unwatch()
            self._beaten = time.monotonic() - self._settings.ttl_s / 4 + _AGAIN_S
            away_s = time.monotonic() - self._contact
            if self._me.reachable and away_s > self._settings.store_s:
                self._pending.clear()
                self._lead_asks = None
                self._happens(StoreLost())

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        found = self._seat.read(anew=not self._watching)
        if not self._watching:
            self._watch_all(found.revision)
        if self._next_write() is None:  # a store that answers and takes nothing is away, too
            self._contact = time.monotonic()
        self._happens(Seen(found.epoch) if self._me.reachable else StoreBack(found.epoch))
        self._led()
        if reason := self._seat.trouble(found):
            self._happens(Trouble(reason))
        self._seat.keep()

    def _next_write(self) -> Write | None:
        if self._pending:
            return next(iter(self._pending.values()))
        return self._lead_asks

    def _say(self, write: Write) -> None:
        applied, epoch = self._seat.write(write)
        self._contact = time.monotonic()
        if self._pending.get(type(write)) is write:
            del self._pending[type(write)]
        if self._lead_asks == write:
            self._lead_asks = None
        self._happens(Written(write, applied, epoch))

    def _pause(self) -> float:
        now = time.monotonic()
        until = [self._beaten + self._settings.ttl_s / 4, now + 1.0]
        if self._me.deadline is not None:
            until.append(self._me.deadline)
        if self._next_write() is not None and self._me.reachable:
            until.append(now + _AGAIN_S)
        return max(0.0, min(until) - now)

    def _watch_all(self, revision: int) -> None:
        for watch in self._seat.watches(revision):
            thread = threading.Thread(target=self._pump, args=(watch,), daemon=True)
            self._watching.append((watch, thread))
            thread.start()

    def _unwatch(self) -> None:
        watching, self._watching = self._watching, []
        for watch, thread in watching:
            watch.close()
            thread.join()

    def _pump(self, watch: Watch) -> None:
        while True:
            try:
                for change in watch.wait(_SLICE_S):
                    for event in self._seat.events(change):
                        self._events.put(event)
            except WatchLost:
                self._events.put(_Lost(watch))
                return
