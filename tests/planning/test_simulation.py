# SPDX-License-Identifier: Apache-2.0
"""The formulas of the planner agree with a simulation of jobs that fail. `ci/soak plan` tries the
whole grid and many more."""

from __future__ import annotations

from random import Random

import pytest

from campaigns import plans
from campaigns.tally import Tally
from gpustasis.planning.figures import Figures
from gpustasis.planning.interval import Costs, best, ettr
from gpustasis.planning.plan import job_mtbf_s
from support.plan_simulation import exponential, simulate, weibull

_CASES = 12
_HOUR_S, _DAY_S = 3600.0, 86400.0


@pytest.mark.parametrize("number", range(_CASES))
def test_formula_and_simulation_agree(number: int) -> None:
    random = Random(f"plan {number}")
    tally = Tally()
    plans.check(random, *random.choice(plans.grid()), tally, accuracy=0.005)
    tally.require_clean()


def test_the_best_interval_is_best_in_the_simulation() -> None:
    costs = Costs(stop_s=120, lag_s=60, recovery_s=900)
    mtbf_s = 3 * _HOUR_S
    wanted = best(costs, mtbf_s, 60)
    found = {
        factor: simulate(
            Random(f"{factor}"), costs, wanted * factor, [exponential(mtbf_s)], accuracy=0.002
        ).ratio
        for factor in (0.4, 1.0, 2.5)
    }
    assert found[1.0] > 1.01 * found[0.4]
    assert found[1.0] > 1.01 * found[2.5]


def test_failures_of_parts_are_failures_of_the_job() -> None:
    """12 GPUs on 2 nodes, each with a clock of its own, beside the one MTBF of the job."""
    figures = Figures(
        ("option", {"gpus": 12, "gpu_failures": 400.0, "node_failures": 1700.0}),
    )
    mtbf_s = job_mtbf_s(figures)
    assert mtbf_s == pytest.approx(1000 * _DAY_S / (12 * 400 + 2 * 1700))
    gpu, node = exponential(1000 * _DAY_S / 400), exponential(1000 * _DAY_S / 1700)
    costs = Costs(stop_s=60, lag_s=30, recovery_s=600)
    found = simulate(Random("parts"), costs, 900, [gpu] * 12 + [node] * 2, accuracy=0.004)
    assert found.ratio == pytest.approx(ettr(costs, mtbf_s, 900), rel=plans.BOUND)
    assert found.ratio != pytest.approx(ettr(costs, mtbf_s * 2, 900), rel=plans.BOUND)


@pytest.mark.parametrize(("stop_s", "recovery_s"), [(42.0, 360.0), (8.0, 900.0)])
def test_bursts_of_failures_cost_no_more(stop_s: float, recovery_s: float) -> None:
    """The model does not know of them; docs/planner.md says what they do to its answers."""
    costs, mtbf_s = Costs(stop_s=stop_s, lag_s=0, recovery_s=recovery_s), 10_000.0
    interval = best(costs, mtbf_s, 60)
    found = [
        simulate(
            Random("bursts"), costs, interval * factor, [weibull(mtbf_s, 0.7)], accuracy=0.002
        ).ratio
        for factor in (0.6, 1.0, 1.7)
    ]
    assert found[1] == max(found)
    assert 0.002 < found[1] - ettr(costs, mtbf_s, interval) < 0.015


def test_a_wrong_formula_is_found() -> None:
    """The bound is narrower than what is commonly left out: failures in recoveries and stops."""
    costs = Costs(stop_s=600, lag_s=0, recovery_s=1800)
    mtbf_s, interval = 3 * _HOUR_S, 3600.0
    first_order = (1 - (costs.recovery_s + interval / 2) / mtbf_s) / (1 + costs.stop_s / interval)
    found = simulate(Random("wrong"), costs, interval, [exponential(mtbf_s)], accuracy=0.004)
    assert abs(found.ratio - first_order) > plans.BOUND * found.ratio
    assert abs(found.ratio - ettr(costs, mtbf_s, interval)) <= plans.BOUND * found.ratio
