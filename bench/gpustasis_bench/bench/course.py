# SPDX-License-Identifier: Apache-2.0
"""The measurements themselves: rounds of dump and restore, contenders taking turns."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter

from gpustasis_bench.bench.checkpointing import Checkpointing, Dumped, Restored
from gpustasis_bench.bench.contenders import OURS, Contender
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import Round, turns
from gpustasis_bench.bench.target import Target
from gpustasis_bench.errors import BenchError, WrongMemoryError

Say = Callable[[str], None]


@dataclass(slots=True)
class Course:
    """One criu, one program to dump, a folder for what the runs leave.

    cooled: how images were made cold before restores, by medium.
    """

    checkpointing: Checkpointing
    program: Path
    work: Path
    environ: Mapping[str, str] = field(repr=False)
    say: Say
    cooled: dict[str, str] = field(default_factory=dict)
    _numbers: Iterator[int] = field(default_factory=itertools.count)

    def compare(
        self, content: Content, medium: Medium, contenders: Sequence[Contender], pairs: int
    ) -> list[Round]:
        """`pairs` rounds of each contender on one process, in the order of statistics.turns.

        Raises WrongMemoryError if a restored process does not hold what it held, BenchError if one
        could not be dumped or restored.
        """
        rounds: list[Round] = []
        with self.target(content) as target:
            wanted = target.digests()
            for pair, contender in by_turns(contenders, pairs):
                made = self._round(target, wanted, content.workload, medium, contender, pair)
                rounds += made
                self.say(describe(made[0]))
        return rounds

    @contextmanager
    def target(self, content: Content) -> Iterator[Target]:
        """A process that holds the content's first state; it ends with the with statement."""
        with self.tree(1) as target:
            target.load(content.layout(0))
            yield target

    @contextmanager
    def tree(
        self, tasks: int, arguments: Sequence[str] | None = None, *, gpu: bool = True
    ) -> Iterator[Target]:
        """So many processes in a tree, which hold nothing yet; they end with the with statement.
        arguments, gpu: as of Target."""
        folder = self.work / f"target-{next(self._numbers)}"
        target = Target(self.program, folder, self.environ, tasks, arguments, gpu=gpu)
        try:
            yield target
        finally:
            target.kill()

    @contextmanager
    def images(self, medium: Medium) -> Iterator[Path]:
        """The name of a folder for a checkpoint; removed afterwards."""
        folder = medium.folder / f"images-{next(self._numbers)}"
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def restore(
        self,
        target: Target,
        wanted: list[str],
        medium: Medium,
        images: Sequence[Path],
        contender: Contender,
        *,
        cold: bool = True,
    ) -> Restored:
        """Restore from the last of `images`, all of which are cold then, and check the memory.
        cold False: out of the page cache, as far as they are in it.

        Raises WrongMemoryError if it differs from `wanted`.
        """
        if cold:
            self.cooled[medium.name] = medium.cool(images)
        restored = self.checkpointing.restore(target, images[-1], contender)
        self._require_memory(target, wanted, f"{contender.name}: restored")
        return restored

    def leave_running(
        self, target: Target, wanted: list[str], medium: Medium, contender: Contender
    ) -> tuple[Dumped, float]:
        """Dump `target`, which runs on, and check its memory. How many seconds it stood still, as
        it says itself.

        Raises WrongMemoryError if it differs from `wanted`.
        """
        with self.images(medium) as images:
            medium.settle()
            return self.leave_running_into(images, target, wanted, contender)

    def leave_running_into(
        self,
        images: Path,
        target: Target,
        wanted: list[str],
        contender: Contender,
        parent: Path | None = None,
    ) -> tuple[Dumped, float]:
        """The same, into the new folder `images`, on top of the checkpoint `parent`.

        Raises BenchError as well if the target saw a gap that is less than the driver took.
        """
        target.watch()
        dumped = self.checkpointing.dump(target, images, contender, parent, leave_running=True)
        gap = target.gap_seconds()
        if gap < dumped.driver_seconds / max(target.gpu_tasks, 1) / 2:
            raise BenchError(
                f"{contender.name}: the job saw a gap of {gap:.3f} s only; it did not watch"
            )
        self._require_memory(target, wanted, f"{contender.name}: left running")
        return dumped, gap

    @staticmethod
    def _require_memory(target: Target, wanted: list[str], what: str) -> None:
        found = target.digests()
        if found != wanted:
            raise WrongMemoryError(f"{what}, the memory is {found}, it was {wanted}")

    def _round(
        self,
        target: Target,
        wanted: list[str],
        workload: str,
        medium: Medium,
        contender: Contender,
        pair: int,
    ) -> list[Round]:
        with self.images(medium) as images:
            medium.settle()
            dumped = self.checkpointing.dump(target, images, contender)
            begin = perf_counter()
            medium.sync()
            synced = perf_counter() - begin
            restored = self.restore(target, wanted, medium, [images], contender)
            made = [_round_of(workload, medium, contender.name, pair, dumped, restored, 0.0)]
            if contender.synced is not None:
                made.append(
                    _round_of(workload, medium, contender.synced, pair, dumped, restored, synced)
                )
        if contender.name == OURS and dumped.staged_bytes == 0:
            raise BenchError("the plugin stored no GPU memory of its own")
        return made


def by_turns(contenders: Sequence[Contender], pairs: int) -> Iterator[tuple[int, Contender]]:
    """Each of them in each of so many rounds, in the order of statistics.turns, with the number of
    the round."""
    by_name = {each.name: each for each in contenders}
    for pair, order in enumerate(turns(list(by_name), pairs)):
        for name in order:
            yield pair, by_name[name]


def describe(measured: Round) -> str:
    """A line for somebody who waits."""
    return (
        f"{measured.workload}, {measured.medium}, pair {measured.pair + 1}, {measured.contender}: "
        f"dump {measured.dump_seconds:.2f} s, restore {measured.restore_seconds:.2f} s, "
        f"{measured.stored_bytes / 2**20:.0f} MiB"
    )


def _round_of(
    workload: str,
    medium: Medium,
    name: str,
    pair: int,
    dumped: Dumped,
    restored: Restored,
    extra: float,
) -> Round:
    return Round(
        workload=workload,
        medium=medium.name,
        contender=name,
        pair=pair,
        dump_seconds=dumped.seconds + extra,
        frozen_seconds=dumped.frozen_seconds,
        restore_seconds=restored.seconds,
        stored_bytes=dumped.stored_bytes,
        dump_peak_rss_bytes=dumped.peak_rss_bytes,
        restore_peak_rss_bytes=restored.peak_rss_bytes,
        criu_seconds=dumped.criu_seconds,
        dump_driver_seconds=dumped.driver_seconds,
        restore_driver_seconds=restored.driver_seconds,
    )
