# SPDX-License-Identifier: Apache-2.0
"""How much of its time a job that fails now and then spends on work that counts, and the interval
between checkpoints at which that is most.

The model, exact for failures that come at random with one mean time between them (MTBF, M): the job
works for an interval (t), stands still while a checkpoint is taken (C), works on, and the
checkpoint counts when it has been written (L later). A failure at any moment, in a stop or in a
recovery too, costs a recovery (R) from the last checkpoint that counts. With P = t + C the share of
time that is work which counts is

    t / M * exp(-(L + R) / M) / (exp(P / M) - 1).

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9),
1974; J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps",
FGCS 22(3), 2006, whose model it is, with L added; docs/planner.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

_STEPS = 200  # Newton's, which needs about ten


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """What one way of taking checkpoints costs a job, in seconds.

    stop_s: that the job stands still for a checkpoint. lag_s: from the end of that until the
    checkpoint counts; the next one is not begun before. recovery_s: from a failure until the job
    works again. slowdown: share of all work that is lost to it, 0 to 1.
    """

    stop_s: float
    lag_s: float
    recovery_s: float
    slowdown: float = 0.0

    def __post_init__(self) -> None:
        for name in ("stop_s", "lag_s", "recovery_s"):
            _require(name, getattr(self, name), positive=False)
        if not 0 <= self.slowdown < 1:
            raise ValueError(f"slowdown is {self.slowdown}, not a share from 0 to below 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """Where the time of a job goes; together 1.

    work: that counts. stops: for checkpoints that count. slowdown: of work that counts. again: work
    that a failure has undone, with the stops in it. recovery: from failures until the job works.
    """

    work: float
    stops: float
    slowdown: float
    again: float
    recovery: float


def young(cost_s: float, mtbf_s: float) -> float:
    """Seconds between checkpoints that lose the least time, where one stops the job for cost_s and
    a failure comes every mtbf_s on average: sqrt(2 cost MTBF). Good while cost_s is much smaller
    than mtbf_s. Raises ValueError unless both are positive.
    """
    if cost_s <= 0 or mtbf_s <= 0:
        raise ValueError(f"cost {cost_s} s and MTBF {mtbf_s} s must be positive")
    return math.sqrt(2 * cost_s * mtbf_s)


def daly(cost_s: float, mtbf_s: float) -> float:
    """The same by Daly's higher order estimate. Raises ValueError unless both are positive."""
    first = young(cost_s, mtbf_s)
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    ratio = cost_s / (2 * mtbf_s)
    return first * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def best(costs: Costs, mtbf_s: float, least_s: float) -> float:
    """Seconds of work from one checkpoint to the next at which `ettr` is most, of those that are
    at least least_s and leave time for a checkpoint to be written.

    With x = t / M and c = C / M it is where x + exp(-(x + c)) = 1: x = 1 + W(-exp(-1 - c)), W being
    Lambert's function. Raises ValueError.
    """
    _require("mtbf_s", mtbf_s)
    _require("least_s", least_s)
    stop = costs.stop_s / mtbf_s
    share = min(1.0, math.sqrt(2 * stop))  # not below the root; from here each step comes nearer
    for _ in range(_STEPS if stop > 0 else 0):
        slope = -math.expm1(-share - stop)
        nearer = share - (share - slope) / slope
        if not 0 < nearer < share:
            break
        share = nearer
    return max(share * mtbf_s, least_s, costs.lag_s - costs.stop_s)


def ettr(costs: Costs, mtbf_s: float, interval_s: float) -> float:
    """The effective training time ratio: the share of all time that is work which counts.

    interval_s: of work from one checkpoint to the next. Raises ValueError.
    """
    _require("mtbf_s", mtbf_s)
    _require("interval_s", interval_s)
    if interval_s + costs.stop_s < costs.lag_s * (1 - 1e-9):
        raise ValueError(
            f"an interval of {interval_s:g} s is too short: a checkpoint is written for "
            f"{costs.lag_s:g} s"
        )
    share, period = interval_s / mtbf_s, (interval_s + costs.stop_s) / mtbf_s
    lost = (costs.lag_s + costs.recovery_s) / mtbf_s
    counted = math.exp(math.log(share) - lost - _log_expm1(period))
    return (1 - costs.slowdown) * min(1.0, counted)  # of rounding, where next to nothing is lost


def shares(costs: Costs, mtbf_s: float, interval_s: float) -> Shares:
    """Where the time goes. Raises ValueError."""
    work = ettr(costs, mtbf_s, interval_s)
    counted = work / (1 - costs.slowdown)
    stops = counted * costs.stop_s / interval_s
    recovery = -math.expm1(-costs.recovery_s / mtbf_s)
    return Shares(
        work=work,
        stops=stops,
        slowdown=counted - work,
        again=max(0.0, 1 - counted - stops - recovery),
        recovery=recovery,
    )


def from_measurements(
    stops_s: list[float],
    ran_s: float,
    failures: int,
    *,
    expected_mtbf_s: float,
    least_s: float,
    most_s: float,
) -> float:
    """Seconds of work until the next checkpoint, by what was measured so far: `interval = "auto"`.

    stops_s: how long the last checkpoints stopped the job; the median counts, so that one slow
    disk does not change everything. ran_s, failures: of this job until now. expected_mtbf_s: what
    one expects without having seen a failure; it counts as much as one failure does. Always from
    least_s to most_s; least_s if nothing was measured yet: a first checkpoint comes soon. Raises
    ValueError.
    """
    _require("expected_mtbf_s", expected_mtbf_s)
    _require("least_s", least_s)
    _require("ran_s", ran_s, positive=False)
    if failures < 0 or most_s < least_s:
        raise ValueError(f"{failures} failures, intervals from {least_s:g} s to {most_s:g} s")
    for stop_s in stops_s:
        _require("stops_s", stop_s, positive=False)
    if not stops_s:
        return least_s
    mtbf_s = (ran_s + expected_mtbf_s) / (failures + 1)
    stop_s = sorted(stops_s)[len(stops_s) // 2]
    return min(most_s, best(Costs(stop_s=stop_s, lag_s=0, recovery_s=0), mtbf_s, least_s))


def _log_expm1(value: float) -> float:
    """log(exp(value) - 1) of a positive value, however large or small."""
    return value + math.log(-math.expm1(-value))


def _require(name: str, value: float, *, positive: bool = True) -> None:
    if not math.isfinite(value) or value < 0 or (positive and value == 0):
        raise ValueError(f"{name} is {value:g}, not {'positive' if positive else 'at least 0'}")
