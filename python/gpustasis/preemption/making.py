# SPDX-License-Identifier: Apache-2.0
"""The checkpoints of a job: just in time and in between, never two at once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from gpustasis.criu.find import Criu
from gpustasis.criu.images import dump_figures
from gpustasis.criu.plugin import Setting
from gpustasis.errors import CheckpointError
from gpustasis.image.store import read_entry
from gpustasis.intervals import Periodic
from gpustasis.preemption.dumping import PLUGIN, Limits, criu_words, dump
from gpustasis.preemption.estimate import estimate
from gpustasis.preemption.network import unlock
from gpustasis.preemption.records import RECORD_NAME, Identity, Record
from gpustasis.preemption.store import JobStore
from gpustasis.preemption.tree import Memory, describe, memory_of, strays
from gpustasis.text import mib
from gpustasis.verifying import Check

_STATISTICS = "stats-dump"  # CRIU's


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """grace_s: from SIGTERM to SIGKILL. reserve_s: of that, what the job is left with when there is
    no checkpoint. rate: bytes per second of a dump; None: as measured, or assumed.
    checkpointed_status: of this process, once there is a checkpoint. afresh: the job is started
    when none of its checkpoints can be restored; else that is an error. check: what must succeed
    after a restore before the job counts as back; None: nothing. older: if it fails, the next older
    checkpoint is tried; else that is an error. periodic: checkpoints are made in between as well;
    None: only when the job is told to end."""

    command: tuple[str, ...]
    identity: Identity
    criu: Criu
    grace_s: float
    reserve_s: float
    keep_last: int
    rate: int | None
    checkpointed_status: int
    afresh: bool
    network_lock: str
    check: Check | None = None
    older: bool = False
    periodic: Periodic | None = None
    max_chain: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Made:
    """record: with the time that it took, which may still be written. downtime_s: how long the job
    stood."""

    images: Path
    record: Record
    downtime_s: float


class Making:
    """pipes: as in the record. say: told what happens. parent: the checkpoint that the next one may
    be built on."""

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        pipes: tuple[int, int],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._pipes = pipes
        self._say = say
        self.words = criu_words(settings.network_lock)
        self.parent: Path | None = None
        self._failed: list[Path] = []  # of dumps

    def just_in_time(self, root: int, moment: float) -> Made:
        """The job, which was told to end at that moment, is in a checkpoint, and has ended with it.
        Raises CheckpointError, OSError: it runs on."""
        settings = self._settings
        limits = Limits(
            stop=moment + settings.grace_s - settings.reserve_s,
            kill=moment + settings.grace_s - settings.reserve_s / 2,
        )
        memory = self._memory_of_all(root)
        expected = estimate(memory, self._slowest(memory), settings.rate)
        left = limits.stop - time.monotonic()
        text = f"about {expected.seconds:.1f} s ({expected.because})"
        if expected.seconds > left:
            raise CheckpointError(f"it would take {text}, and {max(left, 0):.1f} s are left for it")
        self._require_room(memory)
        how = f"{text}, {left:.1f} s are left"
        return self._make(root, moment, memory, expected.seconds, how, lambda: limits)

    def periodic(self, root: int, asked: Callable[[], float | None]) -> Made:
        """The job runs on, and is in a checkpoint as well. asked: when it was told to end; None: it
        was not. Raises CheckpointError, OSError: there is none."""
        settings = self._settings

        def limits() -> Limits:
            moment = asked()
            if moment is None:
                return Limits(stop=math.inf, kill=math.inf)
            stop = moment + (settings.grace_s - settings.reserve_s) / 2
            return Limits(stop=stop, kill=stop + settings.reserve_s / 4)

        begin = time.monotonic()
        self.clean()  # of the last one: the job has what is its own again
        memory = self._memory_of_all(root)
        self._require_room(memory)
        try:
            made = self._make(root, begin, memory, 0.0, "it is due", limits, runs_on=True)
        except BaseException:
            for directory in self._failed:
                self.give_up(directory)  # the job runs on, and wants its connections
            raise
        with suppress(OSError):  # no time stands there then
            made.record.write(made.images)
        return made

    def clean(self) -> None:
        """Remove what failed dumps have left, as far as nobody needs it."""
        for directory in self._failed:
            self.give_up(directory)
            self.discard(directory)
        self._failed = [each for each in self._failed if each.exists()]

    def give_up(self, directory: Path) -> None:
        """What criu holds back for this checkpoint goes."""
        try:
            unlock(directory)
        except CheckpointError as exc:
            self._say(str(exc))

    def discard(self, directory: Path) -> None:
        """Criu's table of its connections is gone by now."""
        try:
            if not self._store.discard(directory):
                self._say(f"{directory} stays for now: it is in use, or whole")
        except (CheckpointError, OSError) as exc:
            self._say(f"{directory} stays for now: {exc}")

    def _memory_of_all(self, root: int) -> Memory:
        if others := strays(root):
            raise CheckpointError(
                f"process {describe(others[0])} of the job is no longer below its root {root}, and "
                "would not be in the checkpoint"
            )
        return memory_of(root)

    def _require_room(self, memory: Memory) -> None:
        if (free := self._store.free_bytes()) < memory.total:
            raise CheckpointError(
                f"{self._store.directory} has {mib(free)} free, and {mib(memory.total)} may be "
                "needed"
            )

    def _make(
        self,
        root: int,
        moment: float,
        memory: Memory,
        expected_s: float,
        how: str,
        limits: Callable[[], Limits],
        *,
        runs_on: bool = False,
    ) -> Made:
        images = self._store.new_directory()
        self._failed.append(images)
        self._say(f"checkpointing process {root} into {images}: {how}")
        record = Record(
            identity=self._settings.identity,
            pipes=self._pipes,
            memory_bytes=memory.total,
            seconds=expected_s,
        )
        record.prepare(images)  # what a full disk could refuse, before the job is gone
        dump(
            *(self._settings.criu, root, images, limits, self.words),
            plugin=self._plugin(),
            runs_on=runs_on,
        )
        seconds = time.monotonic() - moment
        try:
            record.commit(images)
        except OSError as exc:
            if not (images / RECORD_NAME).exists():
                raise
            self._say(f"{images / RECORD_NAME} may not outlast a power failure: {exc.strerror}")
        self._failed.remove(images)
        self.parent = images
        return Made(
            images=images,
            record=replace(record, seconds=seconds),
            downtime_s=_stood(images, seconds),
        )

    def _plugin(self) -> dict[str, Setting]:
        """Of a job that is checkpointed in between each is built on the one before."""
        longest, parent = self._settings.max_chain, self.parent
        if self._settings.periodic is None or not longest or parent is None:
            return PLUGIN
        if read_entry(parent).incomplete:
            return PLUGIN
        return {**PLUGIN, "parent": str(parent), "max_chain": longest}

    def _slowest(self, memory: Memory) -> Record | None:
        """Of this job's newest checkpoint; where some are built on others, the one by which the
        next takes longest: it may be a full one."""
        found: list[Record] = []
        with suppress(CheckpointError):
            for each in self._store.checkpoints(self._settings.identity):
                if each.record is not None and each.record.seconds > 0:
                    found.append(each.record)
                    if self._settings.periodic is None:
                        break
        return max(found, key=lambda one: estimate(memory, one).seconds, default=None)


def _stood(images: Path, otherwise_s: float) -> float:
    """How long the job did, by criu's own figures."""
    figures: dict[str, int] = {}
    with suppress(OSError):
        figures = dump_figures((images / _STATISTICS).read_bytes())
    stood = [figures[name] for name in ("freezing_time", "frozen_time") if name in figures]
    return sum(stood) / 1e6 if stood else otherwise_s
