# SPDX-License-Identifier: Apache-2.0
"""An epoch of a job with many ranks, on a virtual clock. Keepers, seats, the state machine and the
lead are the code that runs; played are the tasks, the threads, the network and etcd.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast
from unittest import mock

from gpustasis.jobs import epochs, exchange, member
from gpustasis.jobs.etcd import Etcd
from gpustasis.jobs.member import Keeper, Settings, Work, _Attendance
from gpustasis.jobs.messages import Action, Ended, Epoch, Tick
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.seat import Seat
from gpustasis.jobs.store import Change
from support.played_etcd import Load, PlayedEtcd, PlayedWatch, Rates, World

KEYS = Keys("job")


class Events:
    """The queue of a keeper that is played: what comes wakes it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.waiting: deque[Any] = deque()
        self._wake = wake

    def put(self, event: Any) -> None:
        self.waiting.append(event)
        self._wake()


class PlayedTasks:
    """The world says when an action ends. Nothing else is asked of them but this."""

    def enter(self, order: object) -> None:
        """They need not know what the epoch is for."""

    def has_tasks(self) -> bool:
        return True

    def slipped(self) -> str:
        """They stand still."""
        return ""

    def stop(self) -> None:
        """It ends when it would have ended."""


class Played(_Attendance):
    """A keeper in an epoch, without threads: each turn is what the real one does between two waits
    for an event."""

    def __init__(self, scale: Scale, seat: Seat, rank: int) -> None:
        pace = Pace(rank, scale.ranks, scale.settings.writes_per_s)
        super().__init__(seat, scale.ranks, cast("Work", PlayedTasks()), scale.settings, pace)
        self._scale = scale
        self._rank = rank
        self._events: Any = Events(self._wake)
        self._busy_until = 0.0
        self._due = -1.0  # the moment of the next turn
        self.over = False

    def begin(self) -> None:
        self._begin()
        self._exchange()
        self._rest()

    def _turn(self, due: float) -> None:
        if due != self._due or self.over:
            return
        self._due = -1.0
        waiting = self._events.waiting
        self._take(waiting.popleft() if waiting else Tick())
        self._happens(Tick())
        if self._rank == 0:
            self._scale.world.now += self._scale.rates.lead_s
        if not self._is_done():
            self._exchange()
        self._rest()

    def _rest(self) -> None:
        """Until the next turn; or for good."""
        if self._is_done():
            self.over = True
            self.close()
            assert self._me.epoch is not None
            self._scale.is_over(self._me.epoch)
            return
        now = self._scale.world.now
        self._busy_until = now
        self._plan(now if self._events.waiting else now + self._pause())

    def _wake(self) -> None:
        if not self.over:
            self._plan(max(self._scale.world.now, self._busy_until))

    def _plan(self, due: float) -> None:
        if self._due < 0 or due < self._due:
            self._due = due
            self._scale.world.at(due, lambda: self._turn(due))

    def _start(self, action: Action, *, leave_running: bool) -> None:
        record = self._scale.record if action is Action.DUMP else ""
        took_s = self._scale.dump_s if action is Action.DUMP else self._scale.action_s
        end = self._scale.world.now + took_s
        self._scale.world.at(end, lambda: self._events.put(Ended(action, record)))

    def _watch_all(self, revision: int) -> None:
        for watch in self._seat.watches(revision):
            assert isinstance(watch, PlayedWatch)
            watch.told = self._told
            self._watching.append((watch, mock.sentinel.thread))

    def _told(self, change: Change) -> None:
        for event in self._seat.events(change):
            self._events.put(event)

    def _unwatch(self) -> None:
        for watch, _ in self._watching:
            watch.close()
        self._watching = []


@dataclass(slots=True)
class Scale:
    """One epoch. record: of each rank's dump. busy_s: what this took of a processor."""

    ranks: int
    rates: Rates
    settings: Settings = field(default_factory=Settings)
    timeout_s: float = 2.0
    dump_s: float = 1.0
    action_s: float = 0.01
    record: str = "r" * 600
    world: World = field(default_factory=World)
    epoch: Epoch | None = None
    decided_s: float = 0.0
    over_s: float = 0.0
    busy_s: float = 0.0
    _left: int = 0

    def run(self) -> Load:
        """Begin an epoch, and let all ranks end it."""
        etcd = PlayedEtcd(self.world, self.rates, self.timeout_s)
        began = time.process_time()
        with (
            mock.patch.object(member, "time", self.world),
            mock.patch.object(exchange, "time", self.world),
            mock.patch.object(exchange, "_IDLE_S", 1e9),  # there is nothing to look at
        ):
            plan = Plan(world=self.ranks, leave_running=True)
            epochs.begin(etcd, KEYS, plan)
            start, etcd.load.calls = self.world.now, Counter()
            self._left = self.ranks
            for rank in range(self.ranks):  # their watches tell them, one after the other
                etcd.load.calls["events"] += 1
                pace = Pace(rank, self.ranks, self.settings.writes_per_s)
                moment = start + (rank + 1) / self.rates.events + pace.starting_s
                self.world.at(moment, partial(self._attend, etcd, rank))
            phase = KEYS.phase(1)
            self.world.run(lambda: is_decided(etcd.entries[phase].value))
            self.decided_s = self.world.now - start
            etcd.load.decided = etcd.load.calls.copy()
            self.world.run(lambda: not self._left)
            self.over_s = self.world.now - start
            assert not self._left, f"{self._left} ranks never end"
        self.busy_s = time.process_time() - began
        return etcd.load

    def is_over(self, epoch: Epoch) -> None:
        assert self.epoch is None or self.epoch.phase is epoch.phase, f"{self.epoch}, {epoch}"
        self.epoch = epoch
        self._left -= 1

    def _attend(self, etcd: PlayedEtcd, rank: int) -> None:
        keeper = Keeper(etcd, KEYS, rank, self.ranks, cast("Work", None), self.settings)
        number = keeper._find(lambda: False)
        assert number is not None
        Played(self, Seat(etcd, KEYS, number, rank, str(rank)), rank).begin()


def is_decided(phase: str) -> bool:
    return '"committed"' in phase or '"aborted"' in phase


@contextmanager
def counted(calls: Counter[str]) -> Iterator[None]:
    """What a real client asks of etcd, counted as PlayedEtcd does."""
    kinds = {"read": "reads", "write": "writes", "grant": "writes", "revoke": "writes"}
    kinds |= {"keep": "keeps", "watch": "watches"}
    with ExitStack() as stack:
        for name, kind in kinds.items():
            call = _counting(getattr(Etcd, name), calls, kind)
            stack.enter_context(mock.patch.object(Etcd, name, call))
        yield


def _counting(real: Callable[..., Any], calls: Counter[str], what: str) -> Callable[..., Any]:
    def call(*words: Any, **names: Any) -> Any:
        calls[what] += 1
        return real(*words, **names)

    return call
