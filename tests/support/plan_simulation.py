# SPDX-License-Identifier: Apache-2.0
"""A job that fails, event by event: what the planner's formulas are held against.

It knows nothing of them: work, stops, writing, failures and recoveries are events on a queue.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

from gpustasis.planning.interval import Costs

_BETWEEN_LOOKS = 200  # failures
_FAILED, _RECOVERED, _WORKED, _STOPPED, _WRITTEN = range(5)

TimeToFailure = Callable[[Random], float]


@dataclass(frozen=True, slots=True)
class Simulated:
    """ratio: ETTR. error: its standard error. failures: that the job has seen."""

    ratio: float
    error: float
    failures: int


@dataclass(slots=True)
class _Seen:
    """Sums over the times from one failure to the next, and the work saved in each."""

    count: int = 0
    time: float = 0.0
    work: float = 0.0
    time_time: float = 0.0
    time_work: float = 0.0
    work_work: float = 0.0

    def add(self, time: float, work: float) -> None:
        self.count += 1
        self.time += time
        self.work += work
        self.time_time += time * time
        self.time_work += time * work
        self.work_work += work * work

    def ratio(self, costs: Costs) -> Simulated:
        ratio = self.work / self.time
        spread = self.work_work - 2 * ratio * self.time_work + ratio * ratio * self.time_time
        keep = 1 - costs.slowdown
        return Simulated(ratio * keep, math.sqrt(max(0.0, spread)) / self.time * keep, self.count)


def exponential(mtbf_s: float) -> TimeToFailure:
    return lambda random: random.expovariate(1 / mtbf_s)


def weibull(mtbf_s: float, shape: float) -> TimeToFailure:
    """shape below 1: failures come in bursts."""
    scale = mtbf_s / math.gamma(1 + 1 / shape)
    return lambda random: random.weibullvariate(scale, shape)


def simulate(
    random: Random,
    costs: Costs,
    interval_s: float,
    parts: Sequence[TimeToFailure],
    *,
    accuracy: float,
    most_events: int = 20_000_000,
) -> Simulated:
    """Until the standard error is at most `accuracy` of the ratio, or so many events have been.

    parts: each of them has failures of its own, and each failure is one of the whole job.
    """
    queue: list[tuple[float, int, int, int, float]] = []  # time, number, what, run, work
    number = run = events = 0
    done = saved = last_saved = last_failure = 0.0
    seen = _Seen()

    def push(at: float, what: int, of: int, work: float = 0.0) -> None:
        nonlocal number
        number += 1
        heapq.heappush(queue, (at, number, what, of, work))

    for part, draw in enumerate(parts):
        push(draw(random), _FAILED, part)
    push(interval_s, _WORKED, run)
    while events < most_events:
        now, _, what, of, work = heapq.heappop(queue)
        events += 1
        if what == _FAILED:
            run += 1  # events of runs before this one mean nothing any more
            done = saved
            seen.add(now - last_failure, saved - last_saved)
            last_failure, last_saved = now, saved
            push(now + parts[of](random), _FAILED, of)
            push(now + costs.recovery_s, _RECOVERED, run)
            if seen.count % _BETWEEN_LOOKS == 0:
                found = seen.ratio(costs)
                if 0 < found.error <= accuracy * found.ratio:
                    return found
        elif of != run:
            continue
        elif what == _RECOVERED:
            push(now + interval_s, _WORKED, run)
        elif what == _WORKED:
            done += interval_s
            push(now + costs.stop_s, _STOPPED, run)
        elif what == _STOPPED:
            push(now + costs.lag_s, _WRITTEN, run, done)
            push(now + interval_s, _WORKED, run)
        else:
            saved = work
    return seen.ratio(costs)
