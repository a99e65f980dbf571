# SPDX-License-Identifier: Apache-2.0
"""The interval that is computed is the best one."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpustasis.intervals import FIRST_S, SHORTEST_S, automatic, best_interval


def expected_time(interval: float, cost: float, mtbf: float) -> float:
    """Wall-clock time for a unit of work, where failures come at random: Daly's complete model."""
    return mtbf * math.expm1((interval + cost) / mtbf) / interval


@given(mtbf=st.floats(600, 1e7), share=st.floats(1e-6, 0.3))
def test_no_other_interval_is_better(mtbf: float, share: float) -> None:
    cost = share * mtbf
    found = best_interval(cost, mtbf)
    ours = expected_time(found, cost, mtbf)
    others = (expected_time(found * factor / 100, cost, mtbf) for factor in range(40, 250, 5))
    assert ours <= min(others) * 1.002


def test_young_s_is_its_beginning() -> None:
    """Of a checkpoint that costs little against the time between failures."""
    assert best_interval(0.01, 1e6) == pytest.approx(math.sqrt(2 * 0.01 * 1e6), rel=1e-3)
    assert best_interval(10.0, 4.0) == 4.0


def test_the_interval_follows_what_was_measured() -> None:
    assert automatic([], 3600) == FIRST_S
    assert automatic([0.0], 3600) == SHORTEST_S
    slow, slower = automatic([2.0], 86400), automatic([2.0, 8.0, 8.0], 86400)
    assert slower == pytest.approx(2 * slow, rel=0.02)
    one_of_five = [1.0, 1.0, 100.0, 1.0, 1.0]
    assert automatic(one_of_five, 86400) == automatic([1.0], 86400)
