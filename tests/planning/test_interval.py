# SPDX-License-Identifier: Apache-2.0
"""The formulas of the planner: bounds, extremes, and which way each figure moves them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.planning.interval import Costs, best, daly, ettr, from_measurements, shares, young

seconds = st.floats(1e-3, 1e6)
costs_made = st.builds(
    Costs,
    stop_s=st.one_of(st.just(0.0), seconds),
    lag_s=st.one_of(st.just(0.0), seconds),
    recovery_s=st.one_of(st.just(0.0), seconds),
    slowdown=st.floats(0.0, 0.9),
)
mtbfs = st.floats(1.0, 1e9)
factors = st.floats(1.0, 1e3)
SAME = 1 + 1e-9


def at_best(costs: Costs, mtbf_s: float) -> float:
    return ettr(costs, mtbf_s, best(costs, mtbf_s, 1e-3))


@given(costs=costs_made, mtbf_s=mtbfs, factor=st.floats(1e-3, 1e3))
def test_no_other_interval_is_better(costs: Costs, mtbf_s: float, factor: float) -> None:
    interval = best(costs, mtbf_s, 1e-3)
    other = interval * factor
    if other >= max(1e-3, costs.lag_s - costs.stop_s):
        assert ettr(costs, mtbf_s, other) <= ettr(costs, mtbf_s, interval) * SAME


@given(costs=costs_made, mtbf_s=mtbfs, factor=factors)
def test_a_job_that_fails_less_often_does_more(costs: Costs, mtbf_s: float, factor: float) -> None:
    assert at_best(costs, mtbf_s) <= at_best(costs, mtbf_s * factor) * SAME
    interval = max(60.0, costs.lag_s)
    assert ettr(costs, mtbf_s, interval) <= ettr(costs, mtbf_s * factor, interval) * SAME


@pytest.mark.parametrize("name", ["stop_s", "lag_s", "recovery_s"])
@given(costs=costs_made, mtbf_s=mtbfs, more=seconds)
def test_what_takes_longer_costs_more(costs: Costs, mtbf_s: float, more: float, name: str) -> None:
    dearer = replace(costs, **{name: getattr(costs, name) + more})
    # Nothing else decides where writing sets the interval: a longer stop gives it more time.
    if name != "stop_s" or costs.lag_s <= costs.stop_s:
        assert at_best(dearer, mtbf_s) <= at_best(costs, mtbf_s) * SAME
    interval = max(1.0, dearer.lag_s)
    assert ettr(dearer, mtbf_s, interval) <= ettr(costs, mtbf_s, interval) * SAME


@given(costs=costs_made, mtbf_s=mtbfs, factor=factors, more=seconds)
def test_the_interval_grows_with_mtbf_and_stop(
    costs: Costs, mtbf_s: float, factor: float, more: float
) -> None:
    free = replace(costs, lag_s=0.0)
    assert best(free, mtbf_s, 1e-3) <= best(free, mtbf_s * factor, 1e-3) * SAME
    assert (
        best(free, mtbf_s, 1e-3)
        <= best(replace(free, stop_s=free.stop_s + more), mtbf_s, 1e-3) * SAME
    )


@given(costs=costs_made, mtbf_s=mtbfs, interval=seconds)
def test_shares_are_all_of_the_time(costs: Costs, mtbf_s: float, interval: float) -> None:
    found = shares(costs, mtbf_s, max(interval, costs.lag_s))
    parts = (found.work, found.stops, found.slowdown, found.again, found.recovery)
    assert all(0 <= part <= SAME for part in parts)
    assert sum(parts) == pytest.approx(1)


@pytest.mark.parametrize("mtbf_s", [1e3, 1e5, 1e9])
@pytest.mark.parametrize("share", [1e-12, 1e-6, 1e-3])
def test_young_and_daly_are_its_limits(mtbf_s: float, share: float) -> None:
    """Daly's error is of a higher order than Young's."""
    costs = Costs(stop_s=share * mtbf_s, lag_s=0, recovery_s=10)
    exact = best(costs, mtbf_s, 1e-12)
    first = abs(young(costs.stop_s, mtbf_s) / exact - 1)
    higher = abs(daly(costs.stop_s, mtbf_s) / exact - 1)
    assert first <= math.sqrt(share)
    assert higher <= share + 1e-7
    if share > 1e-8:
        assert higher < first / 10


def test_extremes_are_figures() -> None:
    never = Costs(stop_s=0, lag_s=0, recovery_s=0)
    assert ettr(never, 1.0, 1e9) == 0  # no such job ends
    assert ettr(never, 1e12, 1.0) == pytest.approx(1)
    dear = Costs(stop_s=1e9, lag_s=0, recovery_s=1e9)
    assert ettr(dear, 1.0, best(dear, 1.0, 1.0)) == 0
    assert best(dear, 1000.0, 1.0) == pytest.approx(1000)  # not longer than a job lives


def test_no_rounding_makes_it_more_than_all() -> None:
    never = Costs(stop_s=0, lag_s=0, recovery_s=0)
    found = [ettr(never, 1.07**power, 0.001) for power in range(100, 450)]
    assert max(found) == 1
    assert min(found) > 0.9999


def test_a_checkpoint_is_not_begun_before_the_last_is_written() -> None:
    costs = Costs(stop_s=1, lag_s=600, recovery_s=60)
    assert best(costs, 3600, 60) == 599
    with pytest.raises(ValueError, match=r"598 s is too short: a checkpoint is written for 600 s"):
        ettr(costs, 3600, 598)


@pytest.mark.parametrize(
    ("name", "value"),
    [("stop_s", -1.0), ("lag_s", math.nan), ("recovery_s", math.inf), ("slowdown", 1.0)],
)
def test_costs_that_are_none_are_refused(name: str, value: float) -> None:
    with pytest.raises(ValueError, match=name):
        Costs(**({"stop_s": 1.0, "lag_s": 0.0, "recovery_s": 0.0} | {name: value}))


@pytest.mark.parametrize("mtbf_s", [0.0, -1.0, math.nan, math.inf])
def test_a_job_has_to_fail_now_and_then(mtbf_s: float) -> None:
    costs = Costs(stop_s=1, lag_s=0, recovery_s=0)
    with pytest.raises(ValueError, match="mtbf_s"):
        ettr(costs, mtbf_s, 60)
    with pytest.raises(ValueError, match="mtbf_s"):
        best(costs, mtbf_s, 60)


class TestFromMeasurements:
    """`interval = "auto"`."""

    def auto(self, stops_s: list[float], ran_s: float, failures: int) -> float:
        return from_measurements(
            stops_s, ran_s, failures, expected_mtbf_s=86400, least_s=60, most_s=7200
        )

    def test_it_is_the_best_interval_of_what_was_measured(self) -> None:
        wanted = best(Costs(stop_s=5, lag_s=0, recovery_s=0), 86400, 60)
        assert self.auto([4, 5, 600], 0, 0) == wanted
        assert wanted == pytest.approx(young(5, 86400), rel=0.01)

    def test_a_first_checkpoint_comes_soon(self) -> None:
        assert self.auto([], 0, 0) == 60

    def test_it_keeps_its_bounds(self) -> None:
        assert self.auto([0.0], 1e9, 0) == 60
        assert self.auto([900.0], 1e9, 0) == 7200

    @given(ran=st.floats(0, 1e8), failures=st.integers(0, 1000), stop=st.floats(0.01, 1e3))
    def test_failures_shorten_it(self, ran: float, failures: int, stop: float) -> None:
        assert self.auto([stop], ran, failures + 1) <= self.auto([stop], ran, failures)
        assert self.auto([stop], ran, failures) <= self.auto([stop], ran + 1000, failures) * SAME

    def test_the_mtbf_comes_near_the_measured_one(self) -> None:
        found = self.auto([10.0], 1000 * 3600.0, 1000)
        assert found == pytest.approx(
            best(Costs(stop_s=10, lag_s=0, recovery_s=0), 3600, 60), rel=0.02
        )

    @pytest.mark.parametrize(
        ("stops", "ran", "failures"),
        [
            ([-1.0], 1.0, 0),
            ([math.nan], 1.0, 0),
            ([1.0], -1.0, 0),
            ([1.0], math.inf, 0),
            ([1.0], 1.0, -1),
        ],
    )
    def test_nonsense_is_refused(self, stops: list[float], ran: float, failures: int) -> None:
        with pytest.raises(ValueError, match=r"stops_s|ran_s|failures"):
            self.auto(stops, ran, failures)
