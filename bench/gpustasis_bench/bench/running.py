# SPDX-License-Identifier: Apache-2.0
"""Dumps of a job that runs on: how long it stands still, from the driver's lock to its unlock."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from statistics import median
from typing import Any

from gpustasis.emulator import RATES_OFF, Emulator, Options, Rates, api_version_of
from gpustasis_bench.bench.contenders import CONTENDERS, OURS, STOCK
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.course import Course, by_turns
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import paired_ratio
from gpustasis_bench.bench.target import Target
from gpustasis_bench.errors import BenchError

SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (1, 4), (1, 8))  # GPUs of each task, tasks
_DRIVER = "580.95.05"
_RATES: dict[str, Rates | None] = {"as measured": None, "off": RATES_OFF}


def measure_content(course: Course, content: Content, medium: Medium, pairs: int) -> dict[str, Any]:
    """`pairs` dumps of each of ours and stock, which leave one job of this content running.

    Raises BenchError, WrongMemoryError if the job's memory is not what it was.
    """
    with course.target(content) as target:
        found = _measure(course, target, medium, pairs)
    return {"workload": content.workload, "gpus": 1, "tasks": 1, "rates": "", **found}


def measure_shapes(course: Course, medium: Medium, pairs: int, size: int) -> list[dict[str, Any]]:
    """The same for trees of SHAPES, each task with `size` bytes of noise on each GPU: on an
    emulator of their own, with 8 GPUs that copy as fast as measured ones, and as fast as memory."""
    found = []
    for rates_name, rates in _RATES.items():
        memory = size * max(tasks for _, tasks in SHAPES)  # all of them use the first GPU
        with _emulated(course, rates, memory) as emulated:
            for gpus, tasks in SHAPES:
                with emulated.tree(tasks) as target:
                    target.spread(gpus, size)
                    one = _measure(emulated, target, medium, pairs)
                shape = {"workload": "noise", "gpus": gpus, "tasks": tasks, "rates": rates_name}
                found.append(shape | one)
    return found


@contextlib.contextmanager
def _emulated(course: Course, rates: Rates | None, memory: int) -> Iterator[Course]:
    emulator = Emulator(path=course.work / "emulator" / "socket")
    emulator.start(Options(gpus=8, memory_bytes=memory, driver=_DRIVER, rates=rates))
    try:
        environ = os.environ | emulator.environment(api_version_of(_DRIVER))
        checkpointing = dataclasses.replace(course.checkpointing, environ=environ)
        yield dataclasses.replace(course, checkpointing=checkpointing, environ=environ)
    finally:
        emulator.stop()


def _measure(course: Course, target: Target, medium: Medium, pairs: int) -> dict[str, Any]:
    downtime: dict[str, list[float]] = {OURS: [], STOCK: []}
    driver: dict[str, list[float]] = {OURS: [], STOCK: []}
    hooks: dict[str, list[float]] = {OURS: [], STOCK: []}
    wanted = target.digests()
    for _, contender in by_turns((CONTENDERS[OURS], CONTENDERS[STOCK]), pairs):
        name = contender.name
        dumped, gap = course.leave_running(target, wanted, medium, contender)
        if gap < dumped.driver_seconds / target.tasks / 2:
            raise BenchError(f"{name}: the job saw a gap of {gap:.3f} s only; it did not watch")
        downtime[name].append(gap)
        driver[name].append(dumped.driver_seconds)
        hooks[name].append(hook_seconds(dumped.record))
        course.say(f"left running, {medium.name}, {name}: the job stood still {gap:.3f} s")
    return {
        "medium": medium.name,
        "pairs": pairs,
        "contenders": {
            name: {
                "downtime_seconds": round(median(downtime[name]), 6),
                "driver_seconds": round(median(driver[name]), 6),
                "hook_seconds": round(median(hooks[name]), 6),
                "downtimes": downtime[name],
            }
            for name in (OURS, STOCK)
        },
        "ratio": paired_ratio(downtime[STOCK], downtime[OURS]).as_dict(),
    }


def hook_seconds(record: dict[str, Any]) -> float:
    """All phases of the plugin, the driver's calls included, over all tasks."""
    phases = [record["phases_ms"], *(task["phases_ms"] for task in record["tasks"])]
    return sum(float(ms) for each in phases for ms in each.values()) / 1000
