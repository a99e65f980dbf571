# SPDX-License-Identifier: Apache-2.0
"""How long a job that is left running stands still, by GPUs, tasks and ways to dump; and what it
costs beside: processor time, host memory, the drain of what lies in memory, the restore."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpustasis.draining.room import empty_pool
from gpustasis.emulator import RATES_OFF, Emulator, Options, api_version_of
from gpustasis_bench.bench.beside import InMemory, drain, measure_neighbours
from gpustasis_bench.bench.checkpointing import stored_bytes
from gpustasis_bench.bench.contenders import (
    DIRECT,
    OFF,
    OURS,
    RATES,
    STAGED,
    STOCK,
    Variant,
    second_variants,
    variants,
)
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.course import Course, by_turns
from gpustasis_bench.bench.downtime_figures import (
    described,
    gpu_bytes_of,
    require_kept,
    without_driver,
)
from gpustasis_bench.bench.downtime_second import second_of
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.model import GB
from gpustasis_bench.bench.programs import why_refused
from gpustasis_bench.bench.target import Target
from gpustasis_bench.errors import BenchError

SHAPES = ((1, 1), (1, 2), (1, 4), (1, 8), (2, 1), (4, 1), (8, 1))  # GPUs of each task, tasks
REAL_BYTES = 4 << 30  # on each GPU: what the smaller memory of the shapes stands for
SHAPE_PAIRS = 3  # at most: stock's driver takes its time eight times over
MOST_GPUS = max(gpus * tasks for gpus, tasks in SHAPES)
_DRIVER = "615.71.09"  # the first branch with custom storage
_DIRECT_KEYS = ("direct_d2h_ms_per_gib", "direct_h2d_ms_per_gib")
_FILL_KEY = "undefined"  # memory that a caller shall write is filled before: no GPU's time
_SLACK = 16 << 20  # of GPU memory, beyond what a job is to hold
_POLL_S = 0.01
_FREE_S = 60.0  # until an emulator has taken back the memory of a job that was killed
_FIXED_BYTES = 2 << 20  # on each GPU, of the dump that is to be nothing but its own overhead
_FIXED = {
    "downtime_seconds": "fixed_seconds",
    "restore_seconds": "fixed_restore_seconds",
    "warm_restore_seconds": "fixed_warm_restore_seconds",
}


@dataclass(slots=True, kw_only=True)
class Downtime:
    """The part of a run that measures downtimes; `found` grows as it goes on.

    Figures of a round: downtime_seconds, from lock to unlock, as the job saw it; dump_seconds, from
    criu's start to its end; driver_seconds of that; cpu_seconds of criu, worker and guardians;
    host_bytes, beyond the job: the most that these and the job's own growth took, and what lies in
    a tmpfs; restore_seconds, from a cold disk, with the driver's, and restore_cpu_seconds,
    without what tasks do that CRIU has begun to restore; drain_seconds, drain_cpu_seconds;
    warm_restore_seconds, from memory, and of stock out of the page cache, where its images are
    after its dump; without_driver_seconds of the downtime, with staging. Of
    ours, reading_seconds: to read the cold images, and no more; of ours that go to the disk at
    once, writing_seconds: to write as many bytes to it, and no more.
    first_downtime_seconds, of one of those whose images lie in memory: before the arena had any.
    Of shapes, fixed_seconds, fixed_restore_seconds and fixed_warm_restore_seconds: of _FIXED_BYTES
    on each GPU, without the time that the driver's rates give for these. Of contents and second
    checkpoints, nonzero_bytes: of gpu_bytes, what is not zero.

    course: of the run; jobs are on emulators of this part's own. medium: where images lie. arena: a
    folder on a tmpfs that is made and removed by the caller. size: bytes on each GPU in SHAPES;
    scale: what rates are divided by there. rates: of RATE_SETS. Once `begin` has been called,
    present are the variants that this build and this emulator have.
    """

    course: Course
    medium: Medium
    arena: Path
    pairs: int
    size: int
    scale: float
    rates: Sequence[str]
    hook_cost: Path
    present: list[Variant] = field(default_factory=list)
    found: dict[str, Any] = field(default_factory=dict)

    def begin(self) -> None:
        """Find out who can be measured. Raises BenchError, EmulatorError."""
        absent: dict[str, str] = {}
        config = self.course.work / "settings.toml"
        environ = self.course.environ
        knows = why_refused(self.hook_cost, environ, {"gpu_memory": "staged"}, config) is None
        with self._emulated(1, _SLACK, 1.0) as (_, has_direct):
            for each in variants(self.arena):
                contender = each.contender
                why = why_refused(self.hook_cost, environ, contender.plugin, config)
                if why is None and each.rates == DIRECT and not has_direct:
                    why = f"this emulator has no setting {_DIRECT_KEYS[0]!r}"
                asked = self._asks(each, is_off=False) or self._asks(each, is_off=True)
                if why is None and not asked:
                    why = f"the rates {each.rates!r} were not asked for"
                if why is not None:
                    absent[each.name] = why
                    self.course.say(f"downtime of {each.name}: {why}")
                    continue
                if knows and each.rates == STAGED:  # a build without the key does nothing else
                    plugin = {**contender.plugin, "gpu_memory": "staged"}
                    contender = dataclasses.replace(contender, plugin=plugin)
                self.present.append(dataclasses.replace(each, contender=contender))
        self.found |= {
            "medium": self.medium.name,
            "pairs": self.pairs,
            "shape_pairs": min(self.pairs, SHAPE_PAIRS),
            "rates": {name: rates.as_dict() for name, rates in RATES.items()},
            "rate_sets": list(self.rates),
            "size_bytes": self.size,
            "scale": self.scale,
            "absent": absent,
            "shapes": [],
            "contents": [],
            "second": [],
            "neighbours": [],
        }

    def measure_shapes(self, shapes: Sequence[tuple[int, int]] = SHAPES) -> None:
        """Each of `shapes`, GPUs of each task and tasks, with noise on each GPU: dumps that leave
        the job running, and restores of the same images after its end; of those that lie in memory
        before their drain too.

        Raises BenchError, WrongMemoryError if the memory is not what it was.
        """
        for is_off in (False, True):
            if self._chosen(is_off=is_off):
                scale = 0.0 if is_off else self.scale
                with self._emulated(MOST_GPUS, self.size + _SLACK, scale) as (course, _):
                    for gpus, tasks in shapes:
                        self.found["shapes"].append(self._shape(course, gpus, tasks, is_off))

    def measure_content(self, content: Content) -> None:
        """The same of one task and GPU with this content, at rates that are not scaled. Raises as
        measure_shapes."""
        if not self._chosen():
            return
        memory = content.gpu_bytes + _SLACK
        with self._emulated(1, memory, 1.0) as (course, _), course.target(content) as target:
            values = self._rounds(course, target, self._chosen(), is_content=True)
        figures = described(values, content.gpu_bytes)
        known = {"workload": content.workload, "nonzero_bytes": content.nonzero_bytes(0)}
        self.found["contents"].append(known | figures)

    def measure_second(self, content: Content) -> None:
        """A second checkpoint, ten steps of training after the first, by turns on top of that and
        full. Of each variant of ours that stages. Raises as measure_shapes."""
        found: dict[str, Any] = {}
        with self._emulated(1, content.gpu_bytes + _SLACK, 1.0) as (course, _):
            for each in second_variants(self._chosen()):
                found[each.name] = second_of(course, self.medium, content, each, self.pairs)
        self.found["second"].append(
            {
                "workload": content.workload,
                "gpu_bytes": content.gpu_bytes,
                "nonzero_bytes": content.nonzero_bytes(1),
                "contenders": found,
            }
        )

    def measure_neighbours(self, content: Content) -> None:
        """What a drain costs programs that keep all processors busy: rounds a second of theirs,
        alone and beside it. The drain is limited to a rate. Raises as measure_shapes."""
        draining = [each for each in self._chosen() if each.in_memory][:1]
        with self._emulated(1, content.gpu_bytes + _SLACK, 1.0) as (course, _):
            for each in draining:
                with course.target(content) as target:
                    found = measure_neighbours(
                        course, target, self.medium, each, content, self.pairs
                    )
                    self.found["neighbours"].append(found)

    def _asks(self, each: Variant, *, is_off: bool) -> bool:
        """Whether it is to be measured without rates, or at its own. All are held against stock."""
        if is_off:
            return OFF in self.rates and each.rates == STAGED
        published = set(self.rates) - {OFF}
        return each.rates in published or (each.name == STOCK and bool(published))

    def _chosen(self, *, is_off: bool = False) -> list[Variant]:
        return [each for each in self.present if self._asks(each, is_off=is_off)]

    def _emulator(self) -> Emulator:
        return Emulator(path=self.course.work / "emulator" / "socket")

    @contextlib.contextmanager
    def _emulated(self, gpus: int, memory: int, scale: float) -> Iterator[tuple[Course, bool]]:
        """The course on an emulator of its own, and whether that has custom storage. scale 0: its
        GPUs copy as fast as memory."""
        emulator = self._emulator()
        staged, direct = (RATES[name] for name in (STAGED, DIRECT))
        rates = (staged.down / scale / GB, staged.up / scale / GB) if scale else RATES_OFF
        emulator.start(Options(gpus=gpus, memory_bytes=memory, driver=_DRIVER, rates=rates))
        try:
            settings = emulator.status()["settings"]
            has_direct = all(key in settings for key in _DIRECT_KEYS)
            if _FILL_KEY in settings:
                emulator.set(_FILL_KEY, "0")
            if has_direct:
                for key, rate in zip(_DIRECT_KEYS, (direct.down, direct.up), strict=True):
                    emulator.set(key, str(round(2**30 * 1000 / rate * scale)))
            environ = os.environ | emulator.environment(api_version_of(_DRIVER))
            checkpointing = dataclasses.replace(self.course.checkpointing, environ=environ)
            yield (
                dataclasses.replace(self.course, checkpointing=checkpointing, environ=environ),
                has_direct,
            )
        finally:
            emulator.stop()

    def _shape(self, course: Course, gpus: int, tasks: int, is_off: bool) -> dict[str, Any]:
        chosen = self._chosen(is_off=is_off)
        words = (str(tasks), "own") if tasks > 1 else ()
        fixed: dict[str, dict[str, float]] = {figure: {} for figure in _FIXED}
        with course.tree(tasks, words) as target:
            target.spread(gpus, _FIXED_BYTES)
            wanted = target.digests()
            for each in chosen:
                rows = []
                for _ in range(2):
                    with course.images(self.medium) as images:
                        rows.append(self._round(course, target, wanted, each, images))
                down, up = (0.0, 0.0) if is_off else self._driver_of_fixed(each, tasks)
                for figure, driver in zip(_FIXED, (down + up, up, up), strict=True):
                    if figure in rows[0]:
                        least = min(row[figure] for row in rows)
                        fixed[figure][each.name] = round(max(0.0, least - driver), 6)
        with course.tree(tasks, words) as target:
            target.spread(gpus, self.size)
            values = self._rounds(course, target, chosen)
        shape = {"workload": "noise", "gpus": gpus, "tasks": tasks}
        shape |= {"rates": OFF if is_off else "published"}
        for figure, name in _FIXED.items():
            shape[name] = fixed[figure]
        return shape | described(values, self.size * gpus * tasks)

    def _driver_of_fixed(self, each: Variant, tasks: int) -> tuple[float, float]:
        """Seconds, down and up, of the driver for the little that _FIXED_BYTES are."""
        rates = RATES[each.rates].divided(self.scale)
        turns = tasks if each.name == STOCK else 1
        return turns * _FIXED_BYTES / rates.down, turns * _FIXED_BYTES / rates.up

    def _fill_arena(
        self, course: Course, target: Target, wanted: list[str], chosen: Sequence[Variant]
    ) -> dict[str, float]:
        """A dump before those that are measured, so that the arena has this much memory: each of
        a job's checkpoints but the first finds it so. Who made it, and how long the job stood,
        with none that an earlier job has left there."""
        for each in chosen:
            if each.in_memory:
                empty_pool(self.arena)
                with course.images(self.medium) as images:
                    _, gap = course.leave_running_into(images, target, wanted, each.contender)
                    drain(course, images)
                return {each.name: round(gap, 6)}
        return {}

    def _rounds(
        self,
        course: Course,
        target: Target,
        chosen: Sequence[Variant],
        *,
        is_content: bool = False,
    ) -> dict[str, dict[str, list[float]]]:
        by_name = {each.name: each for each in chosen}
        values: dict[str, dict[str, list[float]]] = {name: defaultdict(list) for name in by_name}
        wanted = target.digests()
        gpu_bytes = gpu_bytes_of(wanted)
        pairs = self.pairs if is_content else min(self.pairs, SHAPE_PAIRS)
        first = self._fill_arena(course, target, wanted, chosen)
        for pair, contender in by_turns([each.contender for each in chosen], pairs):
            each = by_name[contender.name]
            with course.images(self.medium) as images:
                row = self._round(course, target, wanted, each, images)
            if is_content and each.rates == STAGED:
                row["without_driver_seconds"] = without_driver(
                    row["downtime_seconds"], row["standing_driver_seconds"]
                )
            for figure, value in row.items():
                values[each.name][figure].append(round(value, 6))
            course.say(
                f"downtime, {target.tasks} tasks, {gpu_bytes >> 20} MiB, pair {pair + 1}, "
                f"{each.name}: stood still {row['downtime_seconds']:.3f} s, restored in "
                f"{row['restore_seconds']:.3f} s"
            )
        for name, gap in first.items():
            values[name]["first_downtime_seconds"] = [gap]
        return values

    def _round(
        self,
        course: Course,
        target: Target,
        wanted: list[str],
        each: Variant,
        images: Path,
    ) -> dict[str, float]:
        self.medium.settle()
        before = target.reset_peak()
        folders = [self.arena] if each.in_memory else []
        folders += [self.medium.folder] if self.medium.in_memory else []
        with InMemory(folders) as in_memory:
            dumped, gap = course.leave_running_into(images, target, wanted, each.contender)
        grown = target.peak_bytes() - before
        if each.name == OURS and dumped.staged_bytes == 0:
            raise BenchError("the plugin stored no GPU memory of its own")
        require_kept(each, dumped.record)
        if each.rates == DIRECT and grown > gpu_bytes_of(wanted) // 2 + _SLACK:
            raise BenchError(f"{each.name}: the job grew by {grown} bytes: it was staged after all")
        row = {
            "downtime_seconds": gap,
            "dump_seconds": dumped.seconds + dumped.driver_seconds,
            "driver_seconds": dumped.driver_seconds,
            "standing_driver_seconds": dumped.standing_driver_seconds,
            "cpu_seconds": dumped.cpu_seconds,
            "host_bytes": dumped.peak_rss_bytes + grown + in_memory.most,
        }
        if each.in_memory or each.name == STOCK:
            self._kill(target)
            warm = course.restore(
                target, wanted, self.medium, [images], each.contender, cold=each.in_memory
            )
            row["warm_restore_seconds"] = warm.seconds + warm.driver_seconds
        if each.in_memory:
            drained = drain(course, images)
            row["drain_seconds"], row["drain_cpu_seconds"] = drained.seconds, drained.cpu_seconds
        self._kill(target)
        restored = course.restore(target, wanted, self.medium, [images], each.contender)
        row["restore_seconds"] = restored.seconds + restored.driver_seconds
        row["restore_cpu_seconds"] = restored.cpu_seconds
        # What the storage gives changes from minute to minute: the limit of a round is taken in it.
        if each.name != STOCK:
            row["reading_seconds"] = self.medium.read_seconds([images])
            if not each.in_memory:
                row["writing_seconds"] = self.medium.write_seconds(stored_bytes(images))
        return row

    def _kill(self, target: Target) -> None:
        """End the job, and wait until its GPUs are free: a restore looks. Raises BenchError."""
        target.kill()
        deadline = time.monotonic() + _FREE_S
        while used := sum(gpu["used_bytes"] for gpu in self._emulator().status()["gpus"]):
            if time.monotonic() > deadline:
                raise BenchError(f"{used} bytes of GPU memory are in use {_FREE_S:.0f} s too long")
            time.sleep(_POLL_S)
