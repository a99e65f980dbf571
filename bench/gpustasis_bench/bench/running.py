# SPDX-License-Identifier: Apache-2.0
"""Dumps of a job that runs on: how long it stands still, from the driver's lock to its unlock."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpustasis_bench.bench.contenders import CONTENDERS, OURS, STOCK
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.course import Course, by_turns
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import paired_ratio
from gpustasis_bench.bench.target import Target


def measure_content(course: Course, content: Content, medium: Medium, pairs: int) -> dict[str, Any]:
    """`pairs` dumps of each of ours and stock, which leave one job of this content running.

    Raises BenchError, WrongMemoryError if the job's memory is not what it was.
    """
    with course.target(content) as target:
        found = _measure(course, target, medium, pairs)
    return {"workload": content.workload, "gpus": 1, "tasks": 1, "rates": "", **found}


def _measure(course: Course, target: Target, medium: Medium, pairs: int) -> dict[str, Any]:
    downtime: dict[str, list[float]] = {OURS: [], STOCK: []}
    driver: dict[str, list[float]] = {OURS: [], STOCK: []}
    hooks: dict[str, list[float]] = {OURS: [], STOCK: []}
    wanted = target.digests()
    for _, contender in by_turns((CONTENDERS[OURS], CONTENDERS[STOCK]), pairs):
        name = contender.name
        dumped, gap = course.leave_running(target, wanted, medium, contender)
        downtime[name].append(gap)
        driver[name].append(dumped.standing_driver_seconds)
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
