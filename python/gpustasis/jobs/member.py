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
from dataclasses import dataclass

from gpustasis.errors import JobError, StoreError
from gpustasis.jobs import epochs
from gpustasis.jobs.exchange import SLICE_S, Exchange, Lost, Settings
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import (
    Action,
    Do,
    Ended,
    Epoch,
    Event,
    Phase,
    Place,
    Result,
    Seen,
    Step,
    Stop,
    Tick,
    Trouble,
)
from gpustasis.jobs.pace import Pace
from gpustasis.jobs.protocol import advance, returned
from gpustasis.jobs.records import Keys, number_of, storable
from gpustasis.jobs.seat import Found, Seat
from gpustasis.jobs.store import Store, WatchLost
from gpustasis.jobs.work import Excuse, Excused, Order, Work

__all__ = ["Keeper", "Outcome", "Settings", "Work"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How an epoch ended for this rank. problem: what went wrong with doing what was decided."""

    number: int
    epoch: Epoch
    problem: str

    @property
    def is_back(self) -> bool:
        """A restore was committed."""
        return self.epoch.restores != 0 and self.epoch.phase is Phase.COMMITTED


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
        self._pace = Pace(rank, world, settings.writes_per_s)
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
            self._pace,
        )
        try:
            return attendance.run()
        finally:
            attendance.close()

    def has_open(self) -> bool:
        """Whether the rank had joined an epoch that it has not settled. Raises JobError,
        StoreError: only the store knows."""
        key = self._keys.rank(self._rank)
        joined = number_of(key, self._store.read(key).entries.get(key))
        return joined != 0 and self._is_open(joined)

    def _find(self, is_over: Callable[[], bool]) -> int | None:
        keys = self._keys
        failures = 0
        while True:
            try:
                found = self._store.read(keys.newest, keys.rank(self._rank))
                joined = number_of(keys.rank(self._rank), found.entries.get(keys.rank(self._rank)))
                newest = number_of(keys.newest, found.entries.get(keys.newest))
                if joined and self._is_open(joined):
                    return joined
                if is_over():
                    return None
                if newest > joined and self._is_new(newest):
                    return newest
                watch = self._store.watch(keys.newest, found.revision)
                failures = 0
                try:
                    while not is_over() and not watch.wait(SLICE_S):
                        pass
                finally:
                    watch.close()
                self._wait(self._pace.starting_s, is_over)
            except StoreError as exc:
                log.info("rank %d waits for the store: %s", self._rank, exc)
                if is_over():
                    return None
                self._wait(_joining_again_s(self._pace, self._settings, failures), is_over)
                failures += 1

    def _wait(self, seconds: float, is_over: Callable[[], bool]) -> None:
        until = time.monotonic() + seconds
        while not is_over() and (left := until - time.monotonic()) > 0:
            time.sleep(min(SLICE_S, left))

    def _is_open(self, number: int) -> bool:
        settled = self._keys.settled(number, self._rank)
        return settled not in self._store.read(settled).entries

    def _is_new(self, number: int) -> bool:
        return epochs.phase(self._store, self._keys, number)[0].phase is Phase.LOOK


def _joining_again_s(pace: Pace, settings: Settings, failures: int) -> float:
    return pace.joining_again_s(failures, settings.ttl_s, settings.limits)


class _Attendance(Exchange):
    """One epoch, one rank. Events come in through one queue; the store is spoken to, and the state
    machine advanced, by one thread."""

    def __init__(self, seat: Seat, world: int, work: Work, settings: Settings, pace: Pace) -> None:
        super().__init__(seat, settings, pace)
        self._world = world
        self._work = work

    def run(self) -> Outcome:
        """Until the rank has done what was decided."""
        self._begin()
        while not self._is_done():
            self._exchange()
            if self._is_done():  # nothing comes any more: the next epoch may have begun
                break
            try:
                event = self._events.get(timeout=self._pause())
            except queue.Empty:
                event = Tick()
            self._take(event)
            self._happens(Tick())
            self._require_standing()
        if self._me.place is Place.BROKEN:
            raise JobError(f"{self._seat.name}: {self._me.problem}; its tasks are left as they are")
        epoch = self._me.epoch
        assert epoch is not None
        if self._me.place is Place.OVER and not epoch.phase.is_final:
            if self._work.has_tasks():  # another one must not dump, or restore, this rank
                self._seat.refuse(f"rank {self._seat.rank}: {self._me.problem}, and its tasks run")
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
        failures = 0
        while True:
            try:
                self._beaten = time.monotonic()  # the lease is kept, or made, now
                found = self._seat.take(self._settings.ttl_s)
                if found.world != self._world:
                    self._seat.refuse(
                        f"rank {self._seat.rank} was started with --world {self._world}, and this "
                        f"is for {found.world}"
                    )
                self._watch_all(found.revision)
                break
            except (StoreError, WatchLost) as exc:
                log.info("%s waits for the store: %s", self._seat.name, exc)
                self._unwatch()
                time.sleep(_joining_again_s(self._pace, self._settings, failures))
                failures += 1
        epoch = found.epoch
        order = Order(self._seat.number, epoch.leave_running, epoch.restores, found.joined)
        self._work.enter(order)
        self._contact = now = time.monotonic()
        self._after(
            returned(
                self._limits,
                found.epoch,
                joined=found.joined,
                dumped=found.dumped,
                settled=found.settled,
                now=now,
            )
        )
        self._led()

    def _require_standing(self) -> None:
        """Tasks that run on after their dump: the epoch must not be committed with them."""
        me = self._me
        waits = me.place is Place.WAITING and me.step is Step.DUMPED and not me.aborting
        if waits and (reason := self._work.slipped()):
            self._happens(Trouble(reason))

    def _take(self, event: Event | Found | Lost) -> None:
        match event:
            case Found():
                self._happens(Seen(event.epoch))
                self._led()
            case Lost(watch):
                if any(watch is one for one, _ in self._watching):
                    self._beaten = -1e9  # read, and watch from there
                    self._unwatch()
            case _:
                self._happens(event)

    def _happens(self, event: Event) -> None:
        self._after(advance(self._limits, self._me, event, time.monotonic()))

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
                    self._ask(output)
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
                excuse = exc.excuse if isinstance(exc, Excused) else Excuse.NONE
                ended = Ended(action, problem=str(exc) or type(exc).__name__, excuse=excuse)
            self._events.put(ended)

        threading.Thread(target=act, daemon=True, name=f"{action}").start()

    def _led(self) -> None:
        """The lead asks for what follows from what it has read."""
        if self._seat.rank != LEAD or self._me.epoch is None:
            return
        if self._me.aborting:
            self._lead_asks = None
            return
        self._lead_asks = self._seat.next_move(self._me.epoch, self._world)
