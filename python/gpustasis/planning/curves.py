# SPDX-License-Identifier: Apache-2.0
"""The curves of a plan's picture: training time against the interval, and against the size."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from gpustasis.planning.interval import best, ettr
from gpustasis.planning.plan import Plan, Way

_POINTS = 160
_AROUND = 30.0  # the picture shows intervals so many times shorter and longer than the best
_SMALLER, _LARGER = 64, 8  # and jobs so many times smaller and larger
_SECOND, _MONTH = 1.0, 30 * 86400.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """points: (x, ETTR). mark: the one that is the plan's."""

    way: Way
    points: tuple[tuple[float, float], ...]
    mark: tuple[float, float]


def by_interval(plan: Plan) -> tuple[tuple[float, float], list[Curve]]:
    """The range of intervals in seconds, and a curve for each way that has any."""
    ways = [way for way in plan.ways if way.takes_checkpoints]
    seen = [way.best.interval_s for way in ways]
    seen += [way.chosen.interval_s for way in ways if way.chosen is not None]
    low, high = max(_SECOND, min(seen) / _AROUND), min(_MONTH, max(seen) * _AROUND)
    low, high = min(low, *seen), max(high, 10 * low, *seen)
    return (low, high), [_interval_curve(plan, way, low, high) for way in ways]


def by_size(plan: Plan) -> tuple[tuple[float, float], list[Curve]]:
    """The range of GPU counts, and a curve for each way, each at its own best interval; times stay
    as they are, failures grow with the job."""
    low, high = max(1.0, plan.gpus / _SMALLER), float(plan.gpus * _LARGER)
    found = []
    for way in plan.ways:
        points = []
        for gpus in _spread(low, high):
            mtbf_s = plan.mtbf_s * plan.gpus / gpus
            points.append((gpus, _at_best(plan, way, mtbf_s)))
        mark = (float(plan.gpus), way.best.ettr)
        found.append(Curve(way=way, points=tuple(points), mark=mark))
    return (low, high), found


def _at_best(plan: Plan, way: Way, mtbf_s: float) -> float:
    interval = way.best.interval_s
    if way.takes_checkpoints:
        interval = best(way.costs, mtbf_s, plan.least_interval_s)
    return ettr(way.costs, mtbf_s, interval)


def _interval_curve(plan: Plan, way: Way, low: float, high: float) -> Curve:
    least = max(low, way.costs.lag_s - way.costs.stop_s)
    points = tuple(
        (interval, ettr(way.costs, plan.mtbf_s, interval)) for interval in _spread(least, high)
    )
    return Curve(way=way, points=points, mark=(way.best.interval_s, way.best.ettr))


def _spread(low: float, high: float) -> Iterator[float]:
    """Values from low to high, evenly on a logarithmic axis."""
    for number in range(_POINTS + 1):
        yield math.exp(math.log(low) + math.log(high / low) * number / _POINTS)
