# SPDX-License-Identifier: Apache-2.0
"""An etcd on a virtual clock. It serves requests in the order in which they come, and tells watches
in the order of changes; while it has both to do, they share it. What each costs is measured with a
real one (Rates).
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import TypeVar

from gpustasis.jobs.etcd import _MAX_ENTRIES
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
        snapshot = Snapshot(self.revision, found)
        for start in range(0, max(len(found), 1), _MAX_ENTRIES):
            here = min(_MAX_ENTRIES, len(found) - start)
            in_time = self._serve("reads", 1 / self._rates.reads + here / self._rates.entries)
            self._answer(in_time, None)
        return snapshot

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
                    self._world.at(told, partial(watch.tell, change))


def _beginnings(change: Change) -> set[str]:
    parts = change.key.split("/")
    return {"/".join(parts[:number]) + "/" for number in range(2, len(parts))}


class PlayedWatch:
    """after: changes later than this revision are told."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.closed = False
        self.told: Callable[[Change], None] | None = None

    def tell(self, change: Change) -> None:
        if self.told is not None and not self.closed:
            self.told(change)

    def wait(self, timeout_s: float) -> Sequence[Change]:
        raise NotImplementedError

    def close(self) -> None:
        self.closed = True
