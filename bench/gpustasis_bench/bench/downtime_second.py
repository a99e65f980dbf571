# SPDX-License-Identifier: Apache-2.0
"""How long a job stands still for its second checkpoint: on top of the first, and full."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpustasis_bench.bench.beside import drain
from gpustasis_bench.bench.contenders import Variant
from gpustasis_bench.bench.content import Content
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.downtime_figures import (
    new_bytes,
    ratio_of,
    require_kept,
    without_driver,
)
from gpustasis_bench.bench.medium import Medium


def second_of(
    course: Course, medium: Medium, content: Content, each: Variant, pairs: int
) -> dict[str, Any]:
    """Of one that dumps, by turns full and on top of the first checkpoint, after ten steps of
    training. new_plain_bytes, new_stored_bytes: of those on top, what no parent has, and what was
    written. Raises BenchError, WrongMemoryError if the memory is not what it was."""
    kinds: dict[str, list[float]] = {"full": [], "incremental": []}
    without: dict[str, list[float]] = {"full": [], "incremental": []}
    new: list[tuple[int, int]] = []
    with course.target(content) as target, course.images(medium) as first:
        before = target.digests()
        course.leave_running_into(first, target, before, each.contender)
        if each.in_memory:
            drain(course, first)
        target.load(content.layout(1))
        wanted = target.digests()
        for pair in range(pairs):
            for kind in ("full", "incremental")[:: 1 if pair % 2 == 0 else -1]:
                parent = first if kind == "incremental" else None
                with course.images(medium) as images:
                    medium.settle()
                    dumped, gap = course.leave_running_into(
                        images, target, wanted, each.contender, parent
                    )
                    if each.in_memory:
                        drain(course, images)
                kinds[kind].append(round(gap, 6))
                require_kept(each, dumped.record)
                own = without_driver(gap, dumped.standing_driver_seconds)
                without[kind].append(round(own, 6))
                if parent is not None:
                    new.append(new_bytes(dumped.record))
            course.say(
                f"second checkpoint, pair {pair + 1}, {each.name}: stood still "
                f"{kinds['full'][-1]:.3f} s, incremental {kinds['incremental'][-1]:.3f} s"
            )
    return {
        "downtime_seconds": {kind: median(gaps) for kind, gaps in kinds.items()},
        "without_driver_seconds": {kind: median(gaps) for kind, gaps in without.items()},
        "new_plain_bytes": int(median(plain for plain, _ in new)),
        "new_stored_bytes": int(median(stored for _, stored in new)),
        "rounds": kinds,
        "ratio": ratio_of(kinds["full"], kinds["incremental"]),
        "ratio_without_driver": ratio_of(without["full"], without["incremental"]),
    }
