# SPDX-License-Identifier: Apache-2.0
"""The page of a run: whether a bound is proven, and limits by threads."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Any

import pytest

from gpustasis_bench.bench.bounds import Bound
from gpustasis_bench.bench.markdown import results_text
from gpustasis_bench.bench.report import Report

GIB = 2**30


def made_page(limits: dict[str, Any] | None, *bounds: Bound) -> str:
    report = Report(
        backend="emulator",
        date="2026-11-28",
        machine={
            **dict.fromkeys(("gpu", "cpu", "kernel"), "made up"),
            **dict.fromkeys(("cores", "memory_bytes"), 1),
            "media": {"tmpfs": "tmpfs", "disk": "ext4"},
        },
        versions={},
        options={"pairs": 3, "seed": 1},
        limits=limits,
    ).as_dict()
    return results_text(report | {"bounds": [asdict(bound) for bound in bounds]}, "plot.svg")


@pytest.mark.parametrize(
    ("mean", "low", "high", "text"),
    [
        (3.5, 3.1, 4.0, "yes"),
        (3.5, 2.9, 4.0, "yes, not proven"),
        (3.5, None, None, "yes"),
        (2.5, 2.1, 2.9, "**no**"),
        (2.5, 2.1, 3.1, "**no**, not proven"),
    ],
)
def test_a_bound_that_is_not_proven_says_so(
    mean: float, low: float | None, high: float | None, text: str
) -> None:
    ratio = {"mean": mean, "low": low, "high": high}
    page = made_page(None, Bound.of_ratio("a dump", ">=", 3, "disk", ratio))
    (row,) = (line for line in page.splitlines() if line.startswith("| a dump |"))
    assert row.split(" | ")[4] == text


@pytest.mark.parametrize(
    ("sign", "measured", "in_turn", "text"),
    [
        # Without an interval it has to miss by more than 5 %: 2.85 by 5.3, 2.87 by 4.5.
        (">=", 2.5, 2.85, "**no**, not possible here"),
        (">=", 2.5, 2.87, "**no**"),
        (">=", 2.5, 3.1, "**no**"),
        (">=", 2.5, None, "**no**"),
        ("<=", 3.5, 3.16, "**no**, not possible here"),
        ("<=", 3.5, 3.14, "**no**"),
        ("<=", 3.5, 2.9, "**no**"),
        (">=", 3.5, 2.9, "yes"),
    ],
)
def test_a_bound_out_of_reach_says_so(
    sign: str, measured: float, in_turn: float | None, text: str
) -> None:
    ratio = {"mean": measured, "low": None, "high": None}
    bound = Bound.of_ratio("a dump", sign, 3, "disk", ratio)
    page = made_page(None, replace(bound, in_turn=in_turn))
    (row,) = (line for line in page.splitlines() if line.startswith("| a dump |"))
    assert row.split(" | ")[4] == text


@pytest.mark.parametrize(
    ("sign", "low", "measured", "high", "in_turn", "is_out"),
    [
        # 2.4 is 1.2 times 2: the limit would have to be 2.5 at least.
        (">=", 0.1, 2.0, 2.4, 2.49, True),
        (">=", 0.1, 2.0, 2.4, 2.51, False),
        (">=", 0.1, 2.0, 2.01, 2.98, True),  # a narrow one says more than 5 %
        # 4 is 0.8 times 5: the limit would have to be 3.75 at most.
        ("<=", 4.0, 5.0, 99.0, 3.76, True),
        ("<=", 4.0, 5.0, 99.0, 3.74, False),
        ("<=", 4.99, 5.0, 99.0, 3.01, True),
        # What was measured is better than the limit.
        (">=", 2.0, 2.2, 2.21, 2.1, False),
        ("<=", 3.9, 4.0, 4.1, 4.2, False),
    ],
)
def test_a_limit_is_taken_as_much_better_as_the_spread_of_what_was_measured(
    sign: str, low: float, measured: float, high: float, in_turn: float, is_out: bool
) -> None:
    ratio = {"mean": measured, "low": low, "high": high}
    bound = Bound.of_ratio("a dump", sign, 3, "disk", ratio)
    page = made_page(None, replace(bound, in_turn=in_turn))
    (row,) = (line for line in page.splitlines() if line.startswith("| a dump |"))
    assert ("not possible here" in row) == is_out
    assert f"1 missed, {int(is_out)} of them not possible here" in page
    assert "also at the better end of the spread of what was measured" in page


def test_bounds_are_counted() -> None:
    def bound(mean: float, low: float, in_turn: float) -> Bound:
        ratio = {"mean": mean, "low": low, "high": 1.1 * mean}
        return replace(Bound.of_ratio("a", ">=", 3, "disk", ratio), in_turn=in_turn)

    page = made_page(None, bound(4, 3.5, 5), bound(4, 2, 5), bound(2, 1, 5), bound(2, 1, 2))
    assert "4 bounds: 2 met, 1 of them not proven; 2 missed, 1 of them not possible here" in page


def test_what_was_not_measured_is_not_called_unproven() -> None:
    bound = Bound(
        name="a dump", bound=">= 3", medium="disk", measured=None, met=False, not_measured="too old"
    )
    assert "| - | not measured: too old |" in made_page(None, bound)


def test_limits_stand_under_their_number_of_threads() -> None:
    two = {"1": GIB, "2": 2 * GIB}
    limits = {
        **dict.fromkeys(("memcpy", "read_process", "write_process"), two),
        **dict.fromkeys(("lz4_random", "xxh3"), 3 * GIB),
        "drop": {"1": 3 * GIB},
        "tmpfs": {"write": two, "rewrite": {"1": 5 * GIB, "2": 6 * GIB}, "read": two},
        "disk": {"write": {"8": GIB // 2}, "read": {"8": 4 * GIB}},
    }
    lines = made_page(limits).splitlines()
    begin = lines.index("| GiB/s | 1 thread | 2 threads | 8 threads |")
    assert lines[begin - 2] == "Each is the best of three times."
    assert lines[begin + 1] == "| --- | ---: | ---: | ---: |"
    rows = lines[begin + 2 :]
    assert "| tmpfs: write into one file, over pages that are there | 5.00 | 6.00 |  |" in rows
    assert "| tmpfs: read, cold | 1.00 | 2.00 |  |" in rows
    assert "| disk: write and fdatasync, past the page cache |  |  | 0.50 |" in rows
    assert "| disk: read, cold, past the page cache |  |  | 4.00 |" in rows
    assert "| XXH3-128 | 3.00 |  |  |" in rows
