# SPDX-License-Identifier: Apache-2.0
"""Rates, sizes and intervals are the numbers that they should be."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.planning.interval import young
from gpustasis.watching import (
    Meter,
    Sample,
    best_incremental_interval,
    incremental_bytes,
)

MIB = 1 << 20
positive = st.floats(1e-3, 1e9)


def test_a_meter_sums_up() -> None:
    meter = Meter()
    assert meter.mean_rate == 0
    meter.add(Sample(seconds=2.0, dirty_bytes=8 * MIB, tracked_bytes=32 * MIB))
    meter.add(Sample(seconds=1.0, dirty_bytes=1 * MIB, tracked_bytes=16 * MIB))
    assert meter.mean_rate == 3 * MIB
    assert meter.peak_rate == 4 * MIB
    assert meter.count == 2
    assert meter.last.share == 1 / 16


def test_no_time_and_no_memory_are_no_division() -> None:
    sample = Sample(seconds=0.0, dirty_bytes=0, tracked_bytes=0)
    assert (sample.rate, sample.share) == (0.0, 0.0)


def test_no_more_can_change_than_there_is() -> None:
    assert incremental_bytes(10.0, 1000, 5.0) == 50.0
    assert incremental_bytes(10.0, 1000, 500.0) == 1000.0


def test_the_interval_of_young() -> None:
    assert young(60.0, 24 * 3600.0) == pytest.approx(math.sqrt(2 * 60 * 86400))
    for cost, mtbf in ((0.0, 1.0), (1.0, 0.0), (-1.0, 1.0)):
        with pytest.raises(ValueError, match="must be positive"):
            young(cost, mtbf)


@given(cost=st.floats(0.1, 100.0), mtbf=st.floats(1e4, 1e7), factor=st.floats(0.2, 5.0))
def test_no_other_interval_loses_less(cost: float, mtbf: float, factor: float) -> None:
    """The loss that Young minimises: checkpoints made, and half an interval done again."""

    def loss(interval: float) -> float:
        return cost / interval + interval / 2 / mtbf

    best = young(cost, mtbf)
    assert loss(best) <= loss(best * factor) * (1 + 1e-9)


@given(rate=positive, tracked=st.integers(1, 1 << 44), bandwidth=positive, mtbf=positive)
def test_the_incremental_interval_is_its_own_cost_s(
    rate: float, tracked: int, bandwidth: float, mtbf: float
) -> None:
    interval, cost = best_incremental_interval(rate, tracked, bandwidth, mtbf)
    assert cost == pytest.approx(incremental_bytes(rate, tracked, interval) / bandwidth)
    assert interval <= young(tracked / bandwidth, mtbf) * (1 + 1e-9)
    assert interval == pytest.approx(young(cost, mtbf))


def test_a_job_that_writes_nothing_needs_no_interval() -> None:
    assert best_incremental_interval(0.0, 1000, 1.0, 1.0) == (0.0, 0.0)
    with pytest.raises(ValueError, match="must be positive"):
        best_incremental_interval(1.0, 1, 0.0, 1.0)
