# SPDX-License-Identifier: Apache-2.0
"""A whole run: everything that was asked for, one report."""

from __future__ import annotations

import contextlib
import datetime
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis.criu.find import Criu
from gpustasis.errors import CheckpointError
from gpustasis_bench.bench import chain, cpu_memory, limits, running, sealing
from gpustasis_bench.bench.checkpointing import Checkpointing
from gpustasis_bench.bench.contenders import OURS, STOCK, Contender, why_absent
from gpustasis_bench.bench.content import (
    CPU,
    FINETUNING,
    QLORA,
    SEALED,
    Content,
    Workload,
    obtain_content,
    require_contents,
)
from gpustasis_bench.bench.course import Course, Say
from gpustasis_bench.bench.downtime import REAL_BYTES, SHAPES, Downtime
from gpustasis_bench.bench.medium import Medium, open_medium, remove_leftovers
from gpustasis_bench.bench.programs import compile_program, measure_hooks
from gpustasis_bench.bench.report import Report, describe_machine, describe_versions, write_json
from gpustasis_bench.errors import WrongMemoryError
from gpustasis_bench.machine import Machine, adopt_orphans

_HOOK_CALLS = 20_000
_HOOK_THREADS = (1, 64, 1000)
_SHAPE_BYTES = 256 << 20  # on each GPU, at most
_LIMIT_BYTES = 1 << 30  # moved by each measurement of a limit, at most
_ROOM = 2.5  # times the GPU memory: an image, and the same again while it is compressed
_ROOM_CHAIN = 4.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure. size: bytes of GPU memory. media: where, by name, "tmpfs" or "disk".

    compare: rounds of the contenders with each workload. downtime: the part of that name, with
    rates of contenders.RATE_SETS, divided by scale (None: as the memory is smaller than
    REAL_BYTES), on so many GPUs at most; tmpfs: where its arena is made.
    """

    workloads: tuple[Workload, ...]
    contenders: tuple[Contender, ...]
    media: Mapping[str, Path]
    pairs: int
    size: int
    seed: int
    chains: bool
    limits: bool
    running: bool
    trees: bool
    compare: bool
    downtime: bool
    rates: tuple[str, ...]
    gpus: int
    scale: float | None
    tmpfs: Path
    work: Path
    out: Path

    def described(self) -> dict[str, object]:
        return {
            "workloads": [each.name for each in self.workloads],
            "contenders": [each.name for each in self.contenders],
            "media": list(self.media),
            "pairs": self.pairs,
            "size_bytes": self.size,
            "seed": self.seed,
            "tools_on": next(iter(self.media)),
        }


@dataclass(slots=True)
class Suite:
    """The run: `run` once."""

    options: Options
    criu: Criu
    machine: Machine
    say: Say
    environ: Mapping[str, str] = field(default_factory=lambda: dict(os.environ), repr=False)

    def run(self) -> Report:
        """Measure it all. What fails is told in the report and does not end the run; the file is
        written again after each step.

        Raises CheckpointError if the run cannot begin.
        """
        options = self.options
        require_contents(list(options.workloads))
        adopt_orphans()
        room = _ROOM_CHAIN if self._has_chain() else _ROOM
        with contextlib.ExitStack() as stack:
            media = [
                stack.enter_context(_opened(name, folder, int(options.size * room)))
                for name, folder in options.media.items()
            ]
            remove_leftovers(options.work, "run-*")
            work = stack.enter_context(_emptied(options.work / f"run-{os.getpid()}"))
            report, contenders = self._begin(media)
            course = self._course(work)
            if options.limits:
                self.say("limits of the machine")
                size = min(options.size, _LIMIT_BYTES)
                with self._step(report, course, "limits of the machine"):
                    report.limits = limits.measure_limits(media, size)
            with self._step(report, course, "hook cost"):
                cost = compile_program("hook_cost", options.work)
                for threads in _HOOK_THREADS:
                    found = measure_hooks(cost, self.environ, _HOOK_CALLS // threads + 1, threads)
                    report.hook_costs.append(found)
            if options.downtime:
                self._measure_downtime(media, course, report, stack)
            for workload in options.workloads if options.compare else ():
                self._measure(workload, media, contenders, course, report)
            return report

    def _begin(self, media: Sequence[Medium]) -> tuple[Report, list[Contender]]:
        absent = {each.name: why_absent(each, self.criu) for each in self.options.contenders}
        contenders = [each for each in self.options.contenders if absent[each.name] is None]
        codecs = [each.codec for each in contenders if each.codec is not None]
        for codec in codecs:
            codec.require()
        report = Report(
            backend="emulator" if self.machine.emulated else "driver",
            date=datetime.datetime.now(datetime.UTC).date().isoformat(),
            machine=describe_machine(self.machine.gpu, media),
            versions=describe_versions(self.criu, codecs),
            options=self.options.described(),
            absent={name: why for name, why in absent.items() if why is not None},
        )
        for name, why in report.absent.items():
            self.say(f"{name}: {why}")
        return report, contenders

    def _course(self, work: Path) -> Course:
        logs = work / "logs"
        logs.mkdir()
        return Course(
            checkpointing=Checkpointing(criu=self.criu, environ=self.environ, logs=logs),
            program=compile_program("target", self.options.work),
            work=work,
            environ=self.environ,
            say=self.say,
        )

    def _measure(
        self,
        workload: Workload,
        media: Sequence[Medium],
        contenders: Sequence[Contender],
        course: Course,
        report: Report,
    ) -> None:
        options = self.options
        if workload.cpu_memory:
            self._measure_cpu_memory(workload, media, course, report)
            return
        self.say(f"content of {workload.name}")
        content: Content | None = None
        with self._step(report, course, f"the content of {workload.name}"):
            content = obtain_content(workload, options.size, options.seed, options.work / "content")
        if content is None:
            return
        report.contents.append(content)
        for medium in media:
            name = f"{workload.name} on {medium.name}"
            # A tool that compresses is work of the processors: what it takes is seen once.
            chosen = [each for each in contenders if each.codec is None or medium is media[0]]
            with self._step(report, course, name):
                report.rounds += course.compare(content, medium, chosen, options.pairs)
            if options.running and medium is media[0]:
                with self._step(report, course, f"{name}, left running"):
                    report.running.append(
                        running.measure_content(course, content, medium, options.pairs)
                    )
            if workload.name == QLORA and self._has_chain():
                with self._step(report, course, f"{name}, second checkpoint"):
                    second = chain.measure_second(course, content, medium, options.pairs)
                    report.second_checkpoints.append(second)
                with self._step(report, course, f"{name}, chain"):
                    found = chain.measure_chain(course, content, medium, options.pairs)
                    report.chains.append(found)

    def _measure_downtime(
        self,
        media: Sequence[Medium],
        course: Course,
        report: Report,
        stack: contextlib.ExitStack,
    ) -> None:
        options = self.options
        size = max(min(options.size // 8, _SHAPE_BYTES), 4 << 20)
        arena = options.tmpfs.absolute() / f"gpustasis-bench-{os.getpid()}-arena"
        part = Downtime(
            course=course,
            medium=media[-1],  # the disk, where there is one: there a checkpoint is to end
            arena=stack.enter_context(_emptied(arena)),
            pairs=options.pairs,
            size=size,
            scale=options.scale or max(1.0, REAL_BYTES / size),
            rates=options.rates,
            hook_cost=compile_program("hook_cost", options.work),
        )
        report.downtime = part.found
        with self._step(report, course, "downtime"):
            part.begin()
        if not part.found:
            return
        with self._step(report, course, "downtime by GPUs and tasks"):
            part.measure_shapes([each for each in SHAPES if each[0] * each[1] <= options.gpus])
        asked = {each.name: each for each in options.workloads}
        for name, measures in (
            (FINETUNING, (part.measure_content, part.measure_neighbours)),
            (QLORA, (part.measure_second,)),
        ):
            if name not in asked:
                continue
            for measure in measures:
                with self._step(report, course, f"downtime of {name}, {measure.__name__}"):
                    cache = options.work / "content"
                    measure(obtain_content(asked[name], options.size, options.seed, cache))

    def _measure_cpu_memory(
        self, workload: Workload, media: Sequence[Medium], course: Course, report: Report
    ) -> None:
        options = self.options
        if workload.name == SEALED:
            for medium in media:
                with self._step(report, course, f"{workload.name} on {medium.name}"):
                    report.sealing.append(
                        sealing.measure_sealing(
                            course, workload, medium, options.pairs, options.size, options.seed
                        )
                    )
            return
        for medium in media:
            with self._step(report, course, f"{workload.name} on {medium.name}"):
                found = cpu_memory.measure_workload(
                    course, workload, medium, options.pairs, options.size, options.seed
                )
                report.cpu_memory.append(found)
        if workload.name == CPU and options.trees:
            with self._step(report, course, "trees"):
                report.trees += cpu_memory.measure_trees(course, media[0], options.pairs)

    def _has_chain(self) -> bool:
        names = {each.name for each in self.options.contenders}
        has_qlora = any(each.name == QLORA for each in self.options.workloads)
        return self.options.chains and has_qlora and {OURS, STOCK} <= names

    @contextlib.contextmanager
    def _step(self, report: Report, course: Course, name: str) -> Iterator[None]:
        try:
            yield
        except (CheckpointError, OSError) as exc:
            report.bit_exact = report.bit_exact and not isinstance(exc, WrongMemoryError)
            report.failures.append(f"{name}: {exc}")
            self.say(f"FAILED: {name}: {exc}")
            self._keep_logs(course)
        report.cooled = dict(course.cooled)
        write_json(report.as_dict(complete=False), self.options.out)

    def _keep_logs(self, course: Course) -> None:
        kept = self.options.work / "failed"
        shutil.rmtree(kept, ignore_errors=True)
        shutil.copytree(course.checkpointing.logs, kept)
        self.say(f"its logs are in {kept}")


@contextlib.contextmanager
def _opened(name: str, parent: Path, needed: int) -> Iterator[Medium]:
    medium = open_medium(name, parent, needed)
    with _emptied(medium.folder):
        yield medium


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[Path]:
    """A folder that is not there afterwards."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
