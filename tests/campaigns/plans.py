# SPDX-License-Identifier: Apache-2.0
"""The planner's formulas beside a simulation of jobs that fail."""

from __future__ import annotations

import itertools
import math
from random import Random

from campaigns.tally import Tally
from gpustasis.planning.interval import Costs, best, ettr
from support.plan_simulation import exponential, simulate

BOUND = 0.02  # of the ratio
_ACCURACY = 0.004  # of the ratio: a standard error
_ERRORS = 4.5  # standard errors: chance alone does that once in 150,000 trials
MTBF_S = 10_000.0
# As shares of the MTBF. A job of 16,384 GPUs that fails every 3 hours, stops for 30 s and recovers
# in 10 minutes has 0.003 and 0.06.
INTERVALS = (0.02, 0.1, 0.4, 1.0, 2.0)
STOPS = (0.0, 0.0005, 0.02, 0.5)
LAGS = (0.0, 0.004, 0.25)
RECOVERIES = (0.0, 0.03, 0.8)


def grid() -> list[tuple[Costs, float]]:
    """Costs and intervals, the extreme ones included; none where a checkpoint is begun before the
    last one was written."""
    found: list[tuple[Costs, float]] = []
    for interval, stop, lag, recovery in itertools.product(INTERVALS, STOPS, LAGS, RECOVERIES):
        if interval + stop >= lag:
            costs = Costs(
                stop_s=stop * MTBF_S,
                lag_s=lag * MTBF_S,
                recovery_s=recovery * MTBF_S,
                slowdown=0.05 * (len(found) % 2),
            )
            found.append((costs, interval * MTBF_S))
    return found


def random_case(random: Random) -> tuple[Costs, float]:
    """Each figure from the least to the greatest of the grid, evenly on a logarithmic scale; the
    interval is the best one half of the time."""

    def pick(low: float, high: float) -> float:
        return MTBF_S * low * math.pow(high / low, random.random())

    costs = Costs(
        stop_s=pick(0.0001, 0.5),
        lag_s=pick(0.0001, 0.25),
        recovery_s=pick(0.001, 0.8),
        slowdown=random.choice((0.0, random.random() / 2)),
    )
    least = max(0.02 * MTBF_S, costs.lag_s - costs.stop_s)
    interval = max(pick(0.02, 2.0), least)
    return costs, random.choice((interval, best(costs, MTBF_S, least)))


def check(random: Random, costs: Costs, interval_s: float, tally: Tally, accuracy: float) -> None:
    """One case."""
    wanted = ettr(costs, MTBF_S, interval_s)
    found = simulate(random, costs, interval_s, [exponential(MTBF_S)], accuracy=accuracy)
    tally.counts["trials"] += 1
    tally.counts["failures of jobs"] += found.failures
    off = abs(found.ratio - wanted)
    tally.counts["within 1 %"] += off <= BOUND / 2 * wanted
    if off > BOUND * wanted or off > _ERRORS * found.error:
        tally.failures.append(
            f"{costs}, interval {interval_s:.6g} s, MTBF {MTBF_S:g} s: {wanted:.5f} wanted, "
            f"{found.ratio:.5f} simulated, standard error {found.error:.5f}"
        )


def run(random: Random, cases: int) -> tuple[Tally, Tally]:
    """The whole grid, and so many random cases."""
    of_grid, of_chance = Tally(), Tally()
    for costs, interval_s in grid():
        check(random, costs, interval_s, of_grid, _ACCURACY)
    for _ in range(cases):
        check(random, *random_case(random), of_chance, _ACCURACY)
    return of_grid, of_chance
