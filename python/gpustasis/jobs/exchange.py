# SPDX-License-Identifier: Apache-2.0
"""What a rank's keeper tells the store and asks it, and when; and how it notices that the store is
away."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from dataclasses import dataclass, field

from gpustasis.errors import JobError, StoreError
from gpustasis.jobs.messages import (
    Event,
    Join,
    Limits,
    Move,
    Rank,
    Report,
    Seen,
    Settle,
    Step,
    StoreBack,
    StoreLost,
    Trouble,
    Write,
    Written,
)
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.seat import Found, Seat
from gpustasis.jobs.store import LeaseGone, Watch, WatchLost

log = logging.getLogger(__name__)

SLICE_S = 0.2  # how often a loop looks whether it is to end
_SOON_S = 0.001
_IDLE_S = 1.0  # a keeper looks around after that, whatever happens


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """limits: of the phases. ttl_s: how long the others wait for a rank that says nothing. store_s:
    how long the store may be away before a rank acts without it, if it may. writes_per_s: what the
    whole job may ask of the store; a part of what the store can do."""

    limits: Limits = field(default_factory=Limits)
    ttl_s: int = 10
    store_s: float = 8.0
    writes_per_s: float = 1000.0


@dataclass(frozen=True, slots=True)
class Lost:
    """A watch says nothing any more."""

    watch: Watch


class Exchange(ABC):
    """Of one epoch, one rank. Whoever inherits says what happens then: _happens and _led."""

    def __init__(self, seat: Seat, settings: Settings, pace: Pace) -> None:
        self._seat = seat
        self._settings = settings
        self._pace = pace
        self._limits = pace.limits(settings.limits)
        self._me = Rank()
        self._events: queue.Queue[Event | Found | Lost] = queue.Queue()
        self._pending: dict[type, Write] = {}
        self._turns: dict[type, float] = {}  # of what is pending: not before this moment
        self._beats = 1
        self._failures = 0
        self._again_at = 0.0
        self._lead_asks: Write | None = None
        self._watching: list[tuple[Watch, threading.Thread]] = []
        self._beaten = -1e9
        self._contact = time.monotonic()

    @abstractmethod
    def _happens(self, event: Event) -> None: ...

    @abstractmethod
    def _led(self) -> None: ...

    def _ask(self, write: Write) -> None:
        """Have it written when it is this rank's turn."""
        self._pending[type(write)] = write
        self._turns[type(write)] = time.monotonic() + self._turn_s(write)

    def _turn_s(self, write: Write) -> float:
        begins = isinstance(write, Join) or (isinstance(write, Report) and write.step is Step.READY)
        if begins:
            return 0.0
        return 2 * self._pace.turn_s if isinstance(write, Settle) else self._pace.turn_s

    def _exchange(self) -> None:
        """Tell the store what it has to know; and now and then, ask it how things are."""
        if time.monotonic() < self._again_at:
            return
        writing = False
        try:
            due = time.monotonic() >= self._beaten + self._settings.ttl_s / 4
            if due or not self._me.reachable:
                self._beat()
            writing = True
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
            # A watch says by itself that it has ended, if it can: to watch, and read, anew at each
            # request that was late would be three requests for one.
            if not writing and self._failures:
                self._unwatch()
            again_s = self._pace.again_s(self._failures, self._settings.ttl_s / 4)
            self._again_at = time.monotonic() + again_s
            self._failures += 1
            away_s = time.monotonic() - self._contact
            if self._me.reachable and away_s > self._settings.store_s:
                self._pending.clear()
                self._lead_asks = None
                self._happens(StoreLost())

    def _beat(self) -> None:
        reads = self._pace.reads_in(self._beats)
        is_owed = False  # the reading of this beat, to the next one
        if reads and self._pace.trusts_watches:
            is_owed = self._failures > 0  # what costs the store least comes first
            reads = not is_owed and not self._seat.was_told
        if reads or not self._seat.has_lease or not self._watching or not self._me.reachable:
            # The store is asked what costs it least, until it answers. A rank that has given it up
            # keeps no lease before it can read: the others wait for it.
            if self._failures and self._me.reachable:
                with suppress(LeaseGone):  # the same is said below
                    self._seat.keep()
            self._look()
        self._seat.keep()
        if not is_owed:
            self._beats += 1
            self._seat.was_told = False
        self._beaten = time.monotonic()
        self._failures = 0
        if self._next_write() is None:  # a store that answers and takes nothing is away, too
            self._contact = time.monotonic()

    def _look(self) -> None:
        found = self._seat.read()
        if not self._watching:
            self._watch_all(found.revision)
        self._happens(Seen(found.epoch) if self._me.reachable else StoreBack(found.epoch))
        self._led()
        if reason := self._seat.trouble(found):
            self._happens(Trouble(reason))

    def _next_write(self) -> Write | None:
        now = time.monotonic()
        if self._me.epoch is not None and self._me.epoch.phase.is_final:
            self._pending.pop(Move, None)  # it is decided
        for kind, write in self._pending.items():
            if self._turns[kind] <= now:
                return write
        return self._lead_asks

    def _say(self, write: Write) -> None:
        applied, epoch = self._seat.write(write)
        self._contact = time.monotonic()
        self._failures = 0
        if self._pending.get(type(write)) is write:
            del self._pending[type(write)]
        if self._lead_asks == write:
            self._lead_asks = None
        self._happens(Written(write, applied, epoch))

    def _pause(self) -> float:
        now = time.monotonic()
        until = [self._beaten + self._settings.ttl_s / 4, now + _IDLE_S]
        if self._me.deadline is not None:
            until.append(self._me.deadline)
        if self._me.reachable:
            until += [max(self._turns[kind], now + _SOON_S) for kind in self._pending]
            until += [now + _SOON_S] * (self._lead_asks is not None)
        if now < self._again_at:
            until = [min(self._again_at, now + _IDLE_S)]  # time passes meanwhile
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
                for change in watch.wait(SLICE_S):
                    for event in self._seat.events(change):
                        self._events.put(event)
            except WatchLost:
                self._events.put(Lost(watch))
                return
