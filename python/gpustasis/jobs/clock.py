# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a whole job by the clock: rank 0's keeper begins them, and every keeper removes
what is older."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from gpustasis.errors import CheckpointError, JobError, StoreError
from gpustasis.intervals import Periodic, Schedule
from gpustasis.jobs import epochs
from gpustasis.jobs.kept import prune, records_of
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, number_of
from gpustasis.jobs.store import Put, Require

_LOOK_S = 0.2
_LOCK_S = 10.0
_LOCK = "prune"


MayBegin = Callable[[], Sequence[Require] | None]


def _always() -> Sequence[Require]:
    return ()


class Clock(threading.Thread):
    """told: is called with what happens, in words. may_begin: what must hold in the store when a
    checkpoint is begun; None: now none is begun. Ends with `stop`."""

    def __init__(
        self,
        context: Context,
        periodic: Periodic,
        told: Callable[[str], object],
        may_begin: MayBegin = _always,
    ) -> None:
        super().__init__(daemon=True)
        self._context = context
        self._schedule = Schedule(periodic, time.monotonic())
        self._told = told
        self._may_begin = may_begin
        self.stop = threading.Event()

    def run(self) -> None:
        """Until it is stopped. While the rank has no tasks, or an epoch has something to do with
        them, nothing is begun."""
        while not self.stop.wait(max(self._schedule.left_s(), _LOOK_S)):
            try:
                self._turn()
            except Exception as exc:  # noqa: BLE001 - without this thread nothing is begun any more
                self._tell(str(exc) if isinstance(exc, CheckpointError) else repr(exc))
                self._schedule.note(time.monotonic(), None)

    def _turn(self) -> None:
        """Raises what the checkpoint does."""
        state = self._context.state
        if not state.lives or state.epoch or self._schedule.left_s():
            return
        requires = self._may_begin()
        if requires is None:
            return
        try:
            downtime = self._checkpoint(requires)
        except CheckpointError:
            if self._may_begin() != requires:
                return  # that is why
            raise
        self._schedule.note(time.monotonic(), downtime)

    def _tell(self, wrong: str) -> None:
        with suppress(OSError):  # who is told may be gone
            self._told(f"job {self._context.place.job} runs on without a checkpoint: {wrong}")

    def _checkpoint(self, requires: Sequence[Require]) -> float | None:
        """How long the slowest rank stood for it; None: it was aborted, which the keepers tell.
        Raises JobError, StoreError."""
        context = self._context
        store, keys = context.store, context.keys
        number = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest)) + 1
        plan, mark = (
            Plan(world=context.world, leave_running=True),
            Put(keys.in_between(number), f"{time.time():.3f}"),
        )
        epochs.begin(store, keys, plan, number=number, requires=requires, puts=[mark])
        while not self.stop.wait(_LOOK_S):
            try:
                epoch, _ = epochs.phase(store, keys, number)
            except StoreError:
                continue  # the ranks decide by themselves
            if epoch.phase is Phase.COMMITTED:
                found = records_of(epochs.standing(store, keys, number))
                return max(one.dump_ms for one in found) / 1000
            if epoch.phase.is_final:
                return None
        return None


@contextmanager
def by_the_clock(
    context: Context,
    periodic: Periodic | None,
    told: Callable[[str], object],
    may_begin: MayBegin = _always,
) -> Iterator[None]:
    """Rank 0's keeper begins checkpoints; the option has no effect on others."""
    clock = None
    if periodic is not None and context.place.rank == LEAD:
        clock = Clock(context, periodic, told, may_begin)
        clock.start()
    try:
        yield
    finally:
        if clock is not None:
            clock.stop.set()


def keep_last(context: Context, count: int) -> list[str]:
    """Remove older checkpoints of the job, those on this host, as `gpustasis job prune`: what was
    removed. Another keeper of the job here may be at it. Raises JobError, StoreError, OSError."""
    place = context.place.run.parent / _LOCK
    descriptor = os.open(place, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _await_lock(descriptor, place)
        done = prune(context.store, context.keys, count)
    finally:
        os.close(descriptor)
    return [directory for one in done for directory in one.directories]


def _await_lock(descriptor: int, place: Path) -> None:
    """Raises JobError: the rank takes part in no epoch as long as its keeper waits here."""
    end = time.monotonic() + _LOCK_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                raise JobError(
                    f"another keeper of this host holds {place} for {_LOCK_S:g} s already"
                ) from None
            time.sleep(_LOOK_S)
        else:
            return


def remove_older(context: Context, told: Callable[[str], object], least: int = 1) -> None:
    """As keep_last of the rank's options says, after a checkpoint that was made; or was to be, for
    there may be no room. least: so many stay: one that has failed never removes a good one."""
    count = context.options.keep_last
    if not count:
        return
    try:
        removed = keep_last(context, max(count, least))
    except (CheckpointError, OSError) as exc:
        told(f"{context.name}: older checkpoints stay: {exc}")
    else:
        if removed:
            told(f"{context.name}: {', '.join(removed)} removed")
