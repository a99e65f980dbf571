# SPDX-License-Identifier: Apache-2.0
"""CPU memory that the plugin stores (`cpu_memory = "ours"`), beside stock CRIU, by turns."""

from __future__ import annotations

import dataclasses
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from gpustasis_bench.bench.contenders import CONTENDERS, OURS, STOCK, Contender
from gpustasis_bench.bench.content import CPU, Workload
from gpustasis_bench.bench.course import Course, by_turns
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import paired_ratio
from gpustasis_bench.bench.target import Target
from gpustasis_bench.errors import BenchError

TREES = (1, 50, 200)  # processes
FIGURES = ("dump_seconds", "frozen_seconds", "restore_seconds", "stored_bytes", "rss_share")
_THREADS = 8
_SCRIPT = Path(__file__).resolve().with_name("heap_target.py")
_STORED_SHARE = 0.9  # of the memory that is meant: the rest is in small pieces

_OURS = Contender(name=OURS, plugin={"cpu_memory": "ours"})
_WITHOUT_CUDA = (_OURS, Contender(name=STOCK, with_plugin=False))
_WITH_CUDA = (_OURS, CONTENDERS[STOCK])

_Pair = tuple[Contender, Contender]
_Values = Mapping[str, Mapping[str, list[float]]]  # contender -> figure -> one for each round


def measure_workload(
    course: Course, workload: Workload, medium: Medium, pairs: int, size: int, seed: int
) -> dict[str, Any]:
    """`pairs` rounds of each of ours and stock on a process that holds `size` bytes, and as many
    dumps that leave it running. cpu: a Python process with 8 threads; mixed: one with CUDA, half of
    whose memory is the GPU's.

    Raises BenchError, WrongMemoryError if the memory is not what it was.
    """
    cpu_only = workload.name == CPU
    contenders = _WITHOUT_CUDA if cpu_only else _WITH_CUDA
    least = size if cpu_only else size // 2
    with target_of(course, cpu_only, size, seed) as target:
        course.say(workload.name)
        values = rounds(course, target, medium, contenders, pairs, least)
        gaps = _gaps(course, target, medium, contenders, pairs)
    for name in (OURS, STOCK):
        values[name]["downtime_seconds"] = gaps[name]
    shape = {"workload": workload.name, "bytes": size}
    return _described(shape, medium, pairs, values, (*FIGURES, "downtime_seconds"))


def measure_trees(
    course: Course, medium: Medium, pairs: int, trees: Sequence[int] = TREES
) -> list[dict[str, Any]]:
    """The same rounds for trees of so many Python processes that hold no large memory."""
    found = []
    for processes in trees:
        with _heap_target(course, 0, 0, processes, 0) as target:
            course.say(f"tree of {processes}")
            values = rounds(course, target, medium, _WITHOUT_CUDA, pairs, 0)
        found.append(_described({"processes": processes}, medium, pairs, values, FIGURES))
    return found


@contextmanager
def target_of(course: Course, cpu_only: bool, size: int, seed: int) -> Iterator[Target]:
    """A process with CPU memory alone, or with as much of its GPU's."""
    if cpu_only:
        with _heap_target(course, size, _THREADS, 1, seed) as target:
            yield target
        return
    with course.tree(1) as target:
        target.spread(1, size // 2)
        target.hold(size // 2)
        yield target


@contextmanager
def _heap_target(
    course: Course, size: int, threads: int, tasks: int, seed: int
) -> Iterator[Target]:
    words = ("-I", "-S", str(_SCRIPT), *map(str, (size, threads, tasks, seed)))
    python = dataclasses.replace(course, program=Path(sys.executable))
    with python.tree(tasks, words, gpu=False) as target:
        yield target


def rounds(
    course: Course,
    target: Target,
    medium: Medium,
    contenders: Sequence[Contender],
    pairs: int,
    least: int,
) -> dict[str, dict[str, list[float]]]:
    """FIGURES of each contender in each round. least: bytes of CPU memory that those store who say
    so."""
    values: dict[str, dict[str, list[float]]] = {
        each.name: defaultdict(list) for each in contenders
    }
    wanted = target.digests()
    for _, contender in by_turns(contenders, pairs):
        name = contender.name
        before = target.resident_bytes()
        with course.images(medium) as images:
            medium.settle()
            dumped = course.checkpointing.dump(target, images, contender)
            stores = contender.plugin.get("cpu_memory") == "ours"
            if stores and dumped.cpu_bytes < least * _STORED_SHARE:
                raise BenchError(
                    f"of {least >> 20} MiB of CPU memory the plugin stored {dumped.cpu_bytes >> 20}"
                )
            restored = course.restore(target, wanted, medium, [images], contender)
        after = target.resident_bytes()
        row = (
            *(dumped.seconds, dumped.frozen_seconds, restored.seconds),
            *(float(dumped.stored_bytes), after / before),
        )
        for figure, value in zip(FIGURES, row, strict=True):
            values[name][figure].append(value)
        course.say(
            f"{medium.name}, {name}: dump {row[0]:.2f} s, restore {row[2]:.2f} s, "
            f"{row[3] / 2**20:.0f} MiB, resident {row[4]:.3f} of before"
        )
    return values


def _gaps(
    course: Course, target: Target, medium: Medium, contenders: _Pair, pairs: int
) -> dict[str, list[float]]:
    gaps: dict[str, list[float]] = defaultdict(list)
    wanted = target.digests()
    for _, contender in by_turns(contenders, pairs):
        name = contender.name
        dumped, gap = course.leave_running(target, wanted, medium, contender)
        if gap < dumped.frozen_seconds / 2:
            raise BenchError(
                f"{name}: the job saw a gap of {gap:.3f} s of {dumped.frozen_seconds:.3f}; "
                "it did not watch"
            )
        gaps[name].append(gap)
        course.say(f"{medium.name}, left running, {name}: stood still {gap:.3f} s")
    return gaps


def _described(
    shape: Mapping[str, Any],
    medium: Medium,
    pairs: int,
    values: _Values,
    figures: tuple[str, ...],
) -> dict[str, Any]:
    """ratios: stock over ours for times, ours over stock for sizes."""
    ratios = {}
    for figure in figures:
        ours, stock = values[OURS][figure], values[STOCK][figure]
        above, below = (stock, ours) if figure.endswith("_seconds") else (ours, stock)
        ratios[figure] = paired_ratio(above, below).as_dict()
    return {
        **shape,
        "medium": medium.name,
        "pairs": pairs,
        "contenders": {
            name: {figure: round(median(values[name][figure]), 6) for figure in figures}
            | {"rounds": {figure: values[name][figure] for figure in figures}}
            for name in (OURS, STOCK)
        },
        "ratios": ratios,
    }
