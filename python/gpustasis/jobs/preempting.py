# SPDX-License-Identifier: Apache-2.0
"""A job that is checkpointed when one of its keepers is told to end, and that goes on from there
when all of them are started again.

The keeper that is told begins an epoch that ends the job; the others take part as in any epoch. If
it is not decided when the grace period, less a reserve, is over, it is aborted, and the tasks get
the signal.

TOP/NAME/waiting/R  rank R waits to be restored: the newest epoch when it began to
TOP/NAME/ended/R    the tasks of rank R have ended by themselves, with status 0: the newest epoch
                    then
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from gpustasis.dump_time import MARGIN, START_S, at_rate
from gpustasis.errors import CheckpointError, DriverError, JobError, StoreError
from gpustasis.jobs import choosing, epochs, kept
from gpustasis.jobs.kept import (
    ended_at,
    newest_whole_or_none,
    numbers_of,
    slowest_dump,
)
from gpustasis.jobs.lead import LEAD
from gpustasis.jobs.messages import Epoch, Phase
from gpustasis.jobs.rank import Context
from gpustasis.jobs.records import Plan, number_of
from gpustasis.jobs.store import Put
from gpustasis.nvml import memory_used
from gpustasis.streaming.tree import Tree, resident_bytes
from gpustasis.task import has_driver_thread
from gpustasis.text import mib

log = logging.getLogger(__name__)

_POLL_S = 0.1
_AGAIN_S = 0.2
_LOOK_S = 2.0  # whether the restore has begun
_LOOK_S = 30.0  # for ranks to join an epoch


@dataclass(frozen=True, slots=True, kw_only=True)
class Grace:
    """grace_s: from SIGTERM to SIGKILL. reserve_s: of that, what the tasks are left with if there
    is no checkpoint. rate: bytes per second of a dump; None: as measured, or assumed."""

    grace_s: float
    reserve_s: float
    rate: int | None = None


class Preempting:
    """Of one keeper. told: is called with what happens, in words. says: with what whoever asks the
    keeper from outside is told. because: why there is no checkpoint; empty: that is not known."""

    def __init__(
        self,
        context: Context,
        grace: Grace,
        told: Callable[[str], object],
        says: Callable[..., object] = lambda **_: None,
    ) -> None:
        self._context = context
        self._grace = grace
        self._told = told
        self._says = says
        self.because = ""
        self._thread: threading.Thread | None = None
        self._gave_up = threading.Event()
        self._is_over = threading.Event()

    def listens(self) -> None:
        """From now on SIGTERM does as it says."""
        self._says(preemptible=True, listens=True)

    def told_to_end(self) -> bool:
        """SIGTERM has come. Whether the job is being checkpointed because of it: the tasks are not
        to have it now."""
        if self._thread is None:
            moment = time.monotonic()
            self._thread = threading.Thread(target=self._run, args=(moment,), daemon=True)
            self._thread.start()
        return not self._gave_up.is_set()

    def over(self) -> None:
        """The job has ended: there is no checkpoint any more, and the tasks are told at once."""
        self._is_over.set()

    def _run(self, moment: float) -> None:
        name, grace = self._context.name, self._grace
        end = moment + grace.grace_s - grace.reserve_s
        found: list[str] = []

        def ask() -> None:
            try:
                found.append(self._checkpoint(end))
            except Exception as exc:  # noqa: BLE001 - whatever it is, the tasks are told
                found.append(str(exc) or type(exc).__name__)

        # A store of several servers may take longer to say that it is away than there is left.
        asking = threading.Thread(target=ask, daemon=True)
        asking.start()
        asking.join(max(0.0, end + grace.reserve_s / 2 - time.monotonic()))
        because = found[0] if found else "it was not known in time whether there is one"
        if not because:
            return  # the keeper does what was decided
        self.because = because
        self._gave_up.set()
        self._says(preemptible=True, listens=True, because=because, gave_up=True)
        self._told(f"{name}: no checkpoint, the tasks are told to end: {because}")
        if self._context.state.lives:
            with suppress(ProcessLookupError):
                os.kill(self._context.state.pid, signal.SIGTERM)

    def _checkpoint(self, end: float) -> str:
        """Why there is none; empty: there is one. Raises CheckpointError."""
        context = self._context
        seconds, made_of = self._expect()
        left = max(end - time.monotonic(), 0.0)
        text = f"about {seconds:.1f} s ({made_of})"
        if seconds > left:
            return f"a checkpoint of the job would take {text}, and {left:.1f} s are left for it"
        self._told(f"{context.name}: the job is checkpointed: {text}, {left:.1f} s are left")
        number = 0
        while time.monotonic() < end and not self._is_over.is_set():
            with suppress(StoreError):  # it may be there again in time
                number = number or self._begin()
                if number:
                    epoch, _ = epochs.phase(context.store, context.keys, number)
                    if epoch.phase.is_final:
                        return _why_aborted(number, epoch)
            time.sleep(_POLL_S)
        late = f"{context.name} was told to end, and had no more time for a checkpoint"
        if self._is_over.is_set():
            late = f"{context.name} was told to end, and the job has ended meanwhile"
        if not number:
            if self._is_over.is_set():
                return late
            return "the store did not answer in time, or another epoch was under way"
        return _why_aborted(number, epochs.abort(context.store, context.keys, number, late))

    def _begin(self) -> int:
        """The epoch that ends the job, which another keeper may have begun; 0: an epoch for
        something else is under way. Raises StoreError."""
        store, keys = self._context.store, self._context.keys
        newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
        if newest:
            epoch, plan = epochs.phase(store, keys, newest)
            if not epoch.phase.is_final:
                return newest if not plan.restores and not plan.leave_running else 0
        with suppress(JobError):  # one was begun meanwhile: the next time
            return epochs.begin(store, keys, Plan(world=self._context.world, leave_running=False))
        return 0

    def _expect(self) -> tuple[float, str]:
        """How long a checkpoint of the job takes, and what that was made of. Of the other ranks
        only the last checkpoint says something: what takes longer is aborted."""
        size = _memory_of(self._context.state.pid)
        rate = self._grace.rate
        if rate is None and (measured := self._measured()) is not None:
            number, seconds = measured
            text = f"the slowest dump of epoch {number} took {seconds:.1f} s"
            return max(START_S, seconds * MARGIN), text
        seconds, because = at_rate(size, rate)
        return seconds, f"{mib(size)} {because}"

    def _measured(self) -> tuple[int, float] | None:
        """Of full dumps, too: what is made now is one."""
        with suppress(CheckpointError):
            return slowest_dump(self._context.store, self._context.keys)
        return None


def _why_aborted(number: int, epoch: Epoch) -> str:
    return "" if epoch.phase is Phase.COMMITTED else f"epoch {number} was aborted: {epoch.note}"


def _memory_of(root: int) -> int:
    """Of the rank: its own, and all in use on this host's GPUs if it uses any."""
    tree = Tree(root)
    try:
        pids = tree.pids
    finally:
        tree.close()
    uses_gpu = False
    for pid in pids:
        with suppress(CheckpointError):  # it has ended
            uses_gpu = uses_gpu or has_driver_thread(pid)
    size = resident_bytes(root)
    if uses_gpu:
        with suppress(DriverError):
            size += memory_used()
    return size


def to_restore(
    context: Context, patience_s: float = _LOOK_S, told: Callable[[str], object] = log.warning
) -> int:
    """The checkpoint that a job goes on from which is started now; 0: it starts afresh, for there
    is none, or all its ranks have ended well after it. Only rank 0's keeper, which begins the
    restore, looks what is held against it; for the others it is the newest one. Waits until an
    epoch that is under way is decided; one that no rank joins is aborted. told: hears what is wrong
    with what is stored, and does not matter.

    Raises JobError if it is of another number of ranks; StoreError.
    """
    store, keys, world = context.store, context.keys, context.world
    begin = time.monotonic()
    while True:
        newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
        phase = epochs.phase(store, keys, newest)[0].phase if newest else Phase.ABORTED
        if phase.is_final:
            break
        if phase is Phase.LOOK and time.monotonic() - begin > patience_s:
            epochs.abort(store, keys, newest, f"{context.name} is started anew")
        time.sleep(_AGAIN_S)
    found = newest_whole_or_none(store, keys)
    if found is None:
        return 0
    ended = ended_at(store, keys, world)
    if ended >= found.number:
        return 0
    if found.plan.world != world:
        raise JobError(
            f"{context.name}: epoch {found.number} is a checkpoint of {found.plan.world} ranks, "
            f"and the job is started with {world}: start it with as many, or give it another name"
        )
    # Any other mark is followed by an older checkpoint once this one was tried.
    if context.options.older and context.place.rank == LEAD:
        marks = {n: m for n, m in kept.marks(store, keys, told).items() if m.takes_keepers}
        choice = choosing.choose(store, keys, ended, marks)
        found = found if choice is None else choice.found
    return found.number


def note_ended(context: Context, told: Callable[[str], object]) -> None:
    """The tasks of this rank have ended well: earlier checkpoints are not for its next start."""
    store, keys = context.store, context.keys
    try:
        newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
        if newest:
            store.write([], [Put(keys.said_by("ended", context.place.rank), str(newest))])
    except CheckpointError as exc:
        told(f"{context.name} has ended well, but the next start of the job restores it: {exc}")


class Restart(threading.Thread):
    """Have the ranks restored once all of them wait: rank 0's keeper begins the epoch. Ends then,
    or when somebody else has begun one, or with `stop`."""

    def __init__(self, context: Context, restored: int, told: Callable[[str], object]) -> None:
        super().__init__(daemon=True)
        self._context = context
        self._restored = restored
        self._told = told
        self.stop = threading.Event()

    def run(self) -> None:
        """Until the epoch has begun."""
        store, keys, rank = self._context.store, self._context.keys, self._context.place.rank
        before = self._newest()
        said: list[int] = []
        refused, waits = "", False
        while not self.stop.is_set():
            try:
                newest = number_of(keys.newest, store.read(keys.newest).entries.get(keys.newest))
                is_new = before is not None and newest != before
                if is_new and epochs.phase(store, keys, newest)[1].restores:
                    return  # it has begun
                if is_new or not waits:
                    store.write([], [Put(keys.said_by("waiting", rank), str(newest))])
                    before, waits = newest, True
                if rank != LEAD:  # another epoch may come first
                    self.stop.wait(_LOOK_S)
                    continue
                missing = self._missing(newest)
                if not missing:
                    plan = Plan(
                        world=self._context.world, leave_running=True, restores=self._restored
                    )
                    epochs.begin(store, keys, plan)
                    return
                if missing != said:
                    said = missing
                    shown = ", ".join(map(str, missing[:16]))
                    self._told(f"{self._context.name}: waits for ranks {shown}, to be restored")
            except StoreError as exc:
                log.info("%s waits for the store: %s", self._context.name, exc)
            except JobError as exc:  # another epoch is under way, or it is gone by now
                if str(exc) != refused:
                    refused = str(exc)
                    self._told(f"{self._context.name}: not restored yet: {refused}")
            self.stop.wait(_AGAIN_S)

    def _newest(self) -> int | None:
        with suppress(CheckpointError):
            keys = self._context.keys
            entry = self._context.store.read(keys.newest).entries.get(keys.newest)
            return number_of(keys.newest, entry)
        return None

    def _missing(self, newest: int) -> list[int]:
        context = self._context
        found = numbers_of(context.store, context.keys, "waiting", context.world)
        return [rank for rank, number in enumerate(found) if number != newest]


def next_to_try(context: Context, restored: int) -> int:
    """As kept.next_to_try; 0: there is none. Raises JobError, StoreError."""
    found = epochs.standing(context.store, context.keys, restored)
    after = kept.next_to_try(context.store, context.keys, found)
    return 0 if after is None else after.number
