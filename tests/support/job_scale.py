# SPDX-License-Identifier: Apache-2.0
"""An epoch of a job with many ranks, on a virtual clock. Keepers, seats, the state machine and the
lead are the code that runs; played are the tasks, the threads, the network and etcd.

etcd serves requests in the order in which they come, and tells watches in the order of changes;
while it has both to do, they share it. What each costs is measured with a real one
(Rates).
"""

from __future__ import annotations

import heapq
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar, cast
from unittest import mock

from gpustasis.jobs import epochs, exchange, member
from gpustasis.jobs.member import Keeper, Settings, Work, _Attendance
from gpustasis.jobs.messages import Action, Ended, Epoch, Tick
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.records import Keys, Plan
from gpustasis.jobs.seat import Seat
from gpustasis.jobs.store import (
    Answer,
    Change,
    Entry,
    LeaseGone,
    Put,
    Require,
    Snapshot,
    Unreachable,
    Watch,
)

KEYS = Keys("job")
_Answer = TypeVar("_Answer")


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What etcd does in a second, of each alone; and the way there and back. lead_s: of the lead's
    own time, for each event that it is told."""

    writes: float
    reads: float
    keeps: float
    events: float
    entries: float  # of a long answer
    way_s: float = 0.0005
    lead_s: float = 0.0001


@dataclass(slots=True)
class Load:
    """What etcd had to do, until the decision and at all."""

    calls: Counter[str] = field(default_factory=Counter)
    decided: Counter[str] = field(default_factory=Counter)
    longest_s: float = 0.0  # that a request has waited


class World:
    """The clock, and what is to happen when. turn_at: since when somebody has their turn; in it,
    now goes on for them alone."""

    def __init__(self) -> None:
        self.now = 0.0
        self.turn_at = 0.0
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()

    def at(self, moment: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (max(moment, self.now), next(self._numbers), what))

    def run(self, until: Callable[[], bool]) -> None:
        while self._queue and not until():
            self.now, _, what = heapq.heappop(self._queue)
            self.turn_at = self.now
            what()

    # What member.py takes of the module time.

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class PlayedEtcd:
    """The entries. Each call takes the clock on to when it is answered."""

    def __init__(self, world: World, rates: Rates, timeout_s: float) -> None:
        self.load = Load()
        self._timeout_s = timeout_s
        self.entries: dict[str, Entry] = {}
        self.revision = 1
        self._world = world
        self._rates = rates
        self._free_at = 0.0  # of requests
        self._told_at = 0.0  # all that watches are to be told
        self._numbers = count(1)
        self._leases: dict[int, tuple[int, float, set[str]]] = {}
        self._watches: dict[str, list[PlayedWatch]] = {}

    def _serve(self, kind: str, cost_s: float) -> bool:
        """Whether the client has heard of it in time. It is done in any case."""
        self.load.calls[kind] += 1
        half_s = self._rates.way_s / 2
        cost_s += min(cost_s, max(0.0, self._told_at - self._world.turn_at))
        # Somebody's second call of a turn may be ahead of the others: it does not hold them up.
        self._free_at = max(self._world.turn_at, self._free_at) + cost_s
        answered = max(self._free_at, self._world.now + half_s + cost_s) + half_s
        waits_s = answered - self._world.now
        self.load.longest_s = max(self.load.longest_s, waits_s)
        if waits_s > self._timeout_s:
            self._world.now += self._timeout_s
            self.load.calls["timeouts"] += 1
            return False
        self._world.now = answered
        return True

    def _answer(self, in_time: bool, answer: _Answer) -> _Answer:
        if not in_time:
            raise Unreachable("etcd cannot be reached: timed out")
        return answer

    def read(self, *keys: str) -> Snapshot:
        found: dict[str, Entry] = {}
        for key in keys:
            if key.endswith("/"):
                found |= {name: e for name, e in self.entries.items() if name.startswith(key)}
            elif key in self.entries:
                found[key] = self.entries[key]
        self.load.calls["entries read"] += len(found)
        cost_s = 1 / self._rates.reads + len(found) / self._rates.entries
        return self._answer(self._serve("reads", cost_s), Snapshot(self.revision, found))

    def write(self, requires: Sequence[Require], puts: Sequence[Put]) -> Answer:
        in_time = self._serve("writes", 1 / self._rates.writes)
        for require in requires:
            entry = self.entries.get(require.key)
            if (entry.revision if entry else 0) != require.revision:
                return self._answer(in_time, Answer(False, self.revision))
        for put in puts:
            if put.lease and not self._is_alive(put.lease):
                raise LeaseGone(f"lease {put.lease} has expired")
        self.revision += 1
        for put in puts:
            self.entries[put.key] = Entry(put.value, self.revision)
            if put.lease:
                self._leases[put.lease][2].add(put.key)
            self._tell(Change(put.key, self.entries[put.key], self.revision))
        return self._answer(in_time, Answer(True, self.revision))

    def grant(self, ttl_s: int) -> int:
        in_time = self._serve("writes", 1 / self._rates.writes)
        lease = next(self._numbers)
        self._leases[lease] = (ttl_s, self._world.now + ttl_s, set())
        return self._answer(in_time, lease)

    def keep(self, lease: int) -> None:
        in_time = self._serve("keeps", 1 / self._rates.keeps)
        if not self._is_alive(lease):
            raise LeaseGone(f"lease {lease} has expired")
        ttl_s, _, keys = self._leases[lease]
        self._leases[lease] = (ttl_s, self._world.now + ttl_s, keys)
        self._answer(in_time, None)

    def revoke(self, lease: int) -> None:
        in_time = self._serve("writes", 1 / self._rates.writes)
        self._end(lease)
        self._answer(in_time, None)

    def expire(self) -> None:
        """As etcd does now and then."""
        now = self._world.now
        for lease in [number for number, (_, end, _) in self._leases.items() if end <= now]:
            self._end(lease)

    def watch(self, key: str, after: int) -> Watch:
        in_time = self._serve("watches", 1 / self._rates.reads)
        watch = PlayedWatch(after)
        if in_time:
            self._watches.setdefault(key, []).append(watch)
        return self._answer(in_time, watch)

    def close(self) -> None:
        pass

    def _is_alive(self, lease: int) -> bool:
        return lease in self._leases and self._leases[lease][1] > self._world.now

    def _end(self, lease: int) -> None:
        if lease in self._leases:
            _, _, keys = self._leases.pop(lease)
            self.revision += 1
            for key in keys & self.entries.keys():
                del self.entries[key]
                self._tell(Change(key, None, self.revision))

    def _tell(self, change: Change) -> None:
        for name in {change.key} | _beginnings(change):
            for watch in self._watches.get(name, ()):
                if not watch.closed and watch.after < change.revision:
                    self.load.calls["events"] += 1
                    cost_s = 1 / self._rates.events
                    cost_s += min(cost_s, max(0.0, self._free_at - self._world.turn_at))
                    self._told_at = max(self._told_at, self._world.turn_at) + cost_s
                    told = max(self._told_at, self._world.now) + self._rates.way_s / 2
                    self._world.at(told, lambda watch=watch: watch.told(change))


def _beginnings(change: Change) -> set[str]:
    parts = change.key.split("/")
    return {"/".join(parts[:number]) + "/" for number in range(2, len(parts))}


class PlayedWatch:
    """after: changes later than this revision are told."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.closed = False
        self.told: Callable[[Change], None] = lambda change: None

    def wait(self, timeout_s: float) -> Sequence[Change]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True


class Events:
    """The queue of a keeper that is played: what comes wakes it."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self.waiting: deque[Any] = deque()
        self._wake = wake

    def put(self, event: Any) -> None:
        self.waiting.append(event)
        self._wake()


class PlayedTasks:
    """Nothing of them is asked but this: the world says when an action ends."""

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
                self.world.at(moment, lambda rank=rank: self._attend(etcd, rank))
            phase = KEYS.phase(1)
            self.world.run(lambda: is_decided(etcd.entries[phase].value))
            self.decided_s = self.world.now - start
            etcd.load.decided = etcd.load.calls.copy()
            self.world.run(lambda: not self._left)
            self.over_s = self.world.now - start
        self.busy_s = time.process_time() - began
        return etcd.load

    def is_over(self, epoch: Epoch) -> None:
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
def counted(calls: Counter[str]) -> Any:
    """What a real client asks of etcd, counted as PlayedEtcd does."""
    from gpustasis.jobs.etcd import Etcd

    kinds = {"read": "reads", "write": "writes", "grant": "writes", "revoke": "writes"}
    kinds |= {"keep": "keeps", "watch": "watches"}
    with mock.patch.multiple(Etcd, **{n: _counting(Etcd, n, calls, k) for n, k in kinds.items()}):
        yield


def _counting(kind: type, name: str, calls: Counter[str], what: str) -> Callable[..., Any]:
    real = getattr(kind, name)

    def call(*words: Any, **names: Any) -> Any:
        calls[what] += 1
        return real(*words, **names)

    return call
