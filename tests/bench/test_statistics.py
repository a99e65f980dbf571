# SPDX-License-Identifier: Apache-2.0
"""Medians, spreads, ratios pair by pair, turns, and the bounds that follow: on made-up numbers."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from typing import Any

import pytest

from gpustasis_bench.bench.bounds import Bound, evaluate, in_turn_seconds, unavoidable_seconds
from gpustasis_bench.bench.statistics import (
    Round,
    disagreements,
    paired_ratio,
    spread,
    summarise,
    turns,
)

LIMITS = {
    "read_process": {"1": 1e9, "2": 2e9},
    "write_process": {"1": 1e9, "2": 1e9},
    "drop": {"1": 8e9},
    "tmpfs": {"write": {"1": 1e9, "2": 4e9}, "read": {"1": 4e9, "2": 8e9}},
}


def measured(contender: str, pair: int, dump: float, **fields: Any) -> Round:
    values: dict[str, Any] = {
        "workload": "inference",
        "medium": "tmpfs",
        "frozen_seconds": dump / 2,
        "restore_seconds": 2 * dump,
        "stored_bytes": 1000,
        "dump_peak_rss_bytes": 10,
        "restore_peak_rss_bytes": 20,
        "dump_driver_seconds": 0.1,
        "restore_driver_seconds": 0.2,
        "criu_seconds": dump,
    }
    return Round(contender=contender, pair=pair, dump_seconds=dump, **values | fields)


def test_spread() -> None:
    found = spread([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found["least"], found["greatest"]) == (1.0, 5.0)
    assert found["relative"] == pytest.approx((4 - 2) / 2 / 3, abs=1e-4)
    assert spread([7.0]) == {"least": 7.0, "greatest": 7.0, "relative": 0.0}
    with pytest.raises(ValueError, match="no value"):
        spread([])


def test_figures_are_medians_and_ratios_are_of_pairs() -> None:
    rounds = [measured("stock", pair, dump) for pair, dump in enumerate((9.0, 4.0, 6.0))]
    rounds += [
        measured("ours", pair, dump, stored_bytes=250)
        for pair, dump in enumerate((1.0, 2.0, 100.0))
    ]
    stock, ours = summarise(rounds, "stock")
    assert (stock["contender"], stock["pairs"], stock["dump_seconds"]) == ("stock", 3, 6.0)
    assert stock["ratios"]["dump_seconds"] == {"mean": 1.0, "low": 1.0, "high": 1.0, "pairs": 3}
    assert ours["dump_seconds"] == 2.0
    # stock over ours: 9, 2 and 0.06; a ratio of medians would be 3
    ratio = ours["ratios"]["dump_seconds"]
    assert ratio["mean"] == pytest.approx((9 * 2 * 0.06) ** (1 / 3), abs=1e-4)
    assert ratio["low"] < 0.06
    assert ratio["high"] > 9
    assert ours["ratios"]["stored_bytes"]["mean"] == 0.25  # ours over stock
    assert ours["peak_rss_bytes"] == 20
    assert ours["driver_seconds"] == {"dump": 0.1, "restore": 0.2}
    assert [each["dump_seconds"] for each in ours["rounds"]] == [1.0, 2.0, 100.0]


def test_the_drivers_time_makes_ratios_smaller() -> None:
    rounds = [measured("stock", 0, 4.0, dump_driver_seconds=2.0)]
    rounds += [measured("ours", 0, 1.0, dump_driver_seconds=2.0)]
    _, ours = summarise(rounds, "stock")
    assert ours["ratios"]["dump_seconds"]["mean"] == 4.0
    assert ours["ratios_with_driver"]["dump_seconds"]["mean"] == 2.0
    assert ours["with_driver"]["dump_seconds"] == 3.0
    assert ours["with_driver"]["frozen_seconds"] == 2.5
    assert ours["with_driver"]["restore_seconds"] == pytest.approx(2.2)


def test_a_round_that_only_one_of_two_has_is_in_no_ratio() -> None:
    rounds = [measured("stock", pair, 4.0) for pair in range(2)]
    rounds += [measured("ours", pair, dump) for pair, dump in ((1, 2.0), (2, 1000.0))]
    _, ours = summarise(rounds, "stock")
    assert ours["ratios"]["dump_seconds"] == {"mean": 2.0, "low": None, "high": None, "pairs": 1}


def test_without_stock_there_is_no_ratio() -> None:
    (ours,) = summarise([measured("ours", 0, 1.0)], "stock")
    assert set(ours["ratios"].values()) == {None}


def test_an_interval_as_it_stands_in_a_table() -> None:
    """Logarithms 0.1, 0.2, 0.3: mean 0.2, deviation 0.1; t of 2 degrees of freedom is 4.303."""
    found = paired_ratio([math.exp(value) for value in (0.1, 0.2, 0.3)], [1.0, 1.0, 1.0])
    half = 4.303 * 0.1 / math.sqrt(3)
    assert found.mean == pytest.approx(math.exp(0.2))
    assert found.low == pytest.approx(math.exp(0.2 - half))
    assert found.high == pytest.approx(math.exp(0.2 + half))


def test_intervals_hold_the_truth_as_often_as_they_say() -> None:
    numbers = random.Random(3)
    held = 0
    for _ in range(2000):
        above = [2.0 * math.exp(numbers.gauss(0, 0.3)) for _ in range(5)]
        below = [math.exp(numbers.gauss(0, 0.3)) for _ in range(5)]
        found = paired_ratio(above, below)
        assert found.low is not None
        assert found.high is not None
        held += found.low <= 2.0 <= found.high
    assert 0.93 < held / 2000 < 0.97


def test_more_pairs_than_the_table_has() -> None:
    values = [math.exp(0.1 * (-1) ** index) for index in range(200)]
    found = paired_ratio(values, [1.0] * 200)
    assert found.high == pytest.approx(math.exp(1.972 * 0.1 / math.sqrt(199)), rel=1e-3)


@pytest.mark.parametrize(("above", "below"), [([], []), ([1.0], [1.0, 2.0]), ([0.0], [1.0])])
def test_what_is_no_pair_has_no_ratio(above: list[float], below: list[float]) -> None:
    with pytest.raises(ValueError, match=r"no pairs|math domain|positive"):
        paired_ratio(above, below)


@pytest.mark.parametrize("count", range(2, 6))
@pytest.mark.parametrize("rounds", [1, 4, 5, 12])
def test_nobody_follows_himself_and_places_are_even(count: int, rounds: int) -> None:
    names = "ABCDE"[:count]
    orders = list(turns(names, rounds))
    assert [sorted(order) for order in orders] == [list(names)] * rounds
    sequence = "".join(map("".join, orders))
    steps = Counter(itertools.pairwise(sequence))
    assert [name for name in names if (name, name) in steps] == []
    if count > 2:  # of two that never follow themselves, each always follows the other
        counts = [steps[one, other] for one in names for other in names if one != other]
        assert max(counts) - min(counts) <= 2
        for place in range(count):
            taken = Counter(order[place] for order in orders)
            assert max(taken.values()) - min(taken[name] for name in names) <= 2 + rounds // 6


def test_one_alone_follows_himself() -> None:
    assert list(turns(["ours"], 3)) == [("ours",)] * 3


def test_the_same_dumps_must_agree() -> None:
    same = {"stock+lz4": "stock"}
    rounds = [measured("stock", pair, 2.0) for pair in range(3)]
    near = [measured("stock+lz4", pair, 9.0, criu_seconds=2.2) for pair in range(3)]
    far = [measured("stock+lz4", pair, 9.0, criu_seconds=2.4) for pair in range(3)]
    assert disagreements(rounds + near, same) == []
    (found,) = disagreements(rounds + far, same)
    assert "inference on tmpfs: the dumps of stock+lz4 and stock are the same" in found
    assert "1.20" in found
    assert disagreements(rounds, same) == []
    assert disagreements(rounds + far, {}) == []
    quick = [measured("stock+lz4", pair, 9.0, criu_seconds=1.6) for pair in range(3)]
    assert len(disagreements(rounds + quick, same)) == 1


def report_of(*rounds: Round, limits: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "results": summarise(rounds, "stock"),
        "second_checkpoints": [],
        "chains": [],
        "trees": [],
        "cpu_memory": [],
        "sealing": [],
        "limits": limits,
        "hook_costs": [],
        "workloads": {"inference": {"gpu_bytes": 4_000_000_000}},
    }


def test_a_bound_is_met_or_missed_as_it_was_measured() -> None:
    for dump, met in ((2.0, True), (2.1, False)):
        found = evaluate(report_of(measured("stock", 0, 6.0), measured("ours", 0, dump)))
        by_name = {each["name"]: each for each in found}
        bound = by_name["inference dump, stock over ours"]
        assert bound["met"] is met
        assert bound["bound"] == ">= 3"
        assert bound["measured"] == pytest.approx(6 / dump, abs=1e-4)
        assert bound["best"] is None
        assert by_name["inference stored bytes, ours over stock"]["met"] is False


@pytest.mark.parametrize(
    ("sign", "mean", "low", "high", "met", "proven"),
    [
        (">=", 3.5, 3.1, 4.0, True, True),
        (">=", 3.5, 2.9, 4.0, True, False),
        (">=", 2.5, 2.1, 2.9, False, True),
        (">=", 2.5, 2.1, 3.0, False, False),
        ("<=", 2.5, 2.1, 2.9, True, True),
        ("<=", 2.5, 2.1, 3.1, True, False),
        ("<=", 3.5, 3.1, 4.0, False, True),
        ("<=", 3.5, 3.0, 4.0, False, False),
        (">=", 3.5, None, None, True, None),
    ],
)
def test_a_bound_is_proven_where_all_of_its_interval_is_on_the_side_of_its_mean(
    sign: str, mean: float, low: float | None, high: float | None, met: bool, proven: bool | None
) -> None:
    ratio = {"mean": mean, "low": low, "high": high}
    bound = Bound.of_ratio("a dump", sign, 3, "disk", ratio)
    assert (bound.met, bound.proven, bound.bound) == (met, proven, f"{sign} 3")


def test_a_bound_that_cannot_be_measured_is_not_met() -> None:
    found = evaluate(report_of(measured("ours", 0, 1.0)))
    assert [(each["measured"], each["met"], each["proven"]) for each in found] == [
        (None, False, None)
    ] * 3


def test_the_best_possible_comes_from_the_slowest_thing_that_must_be_done() -> None:
    rounds = (measured("stock", 0, 6.0), measured("ours", 0, 3.0, stored_bytes=2_000_000_000))
    dump, restore, *_ = evaluate(report_of(*rounds, limits=LIMITS))
    assert dump["least_of"] == "reading the process"  # 4e9 at 2e9 a second
    assert dump["parts"]["reading the process"] == 2.0
    assert dump["parts"]["writing to tmpfs, synced"] == 0.5
    assert dump["parts"]["dropping the pages"] == 0.5
    assert dump["best"] == 3.0
    assert dump["in_turn"] == 2.0  # 2.0 + 0.5 + 0.5 seconds: a tmpfs takes the processors' time
    assert restore["least_of"] == "writing into the process"
    assert restore["best"] == 6.0


def test_a_disk_works_while_processors_do() -> None:
    parts = {"reading the process": 2.0, "writing to disk, synced": 3.0, "dropping the pages": 0.5}
    assert in_turn_seconds(parts, "disk") == 3.5
    assert in_turn_seconds(parts, "tmpfs") == 5.5


def test_a_restore_need_not_write_zeros() -> None:
    parts = unavoidable_seconds("restore", 4_000_000_000, 1_000_000_000, "tmpfs", LIMITS)
    assert parts == {"reading from tmpfs": 0.125, "writing into the process": 1.0}


def test_memory_beyond_stock_is_bounded() -> None:
    limit = (256 << 20) + 4_000_000
    for beyond, met in ((limit, True), (limit + 1, False)):
        rounds = (
            measured("stock", 0, 1.0),
            measured("ours", 0, 1.0, dump_peak_rss_bytes=20 + beyond),
        )
        bound = evaluate(report_of(*rounds))[-1]
        assert bound["name"].startswith("memory")
        assert bound["met"] is met


def ratio(mean: float) -> dict[str, float]:
    return {"mean": mean, "low": mean - 0.1, "high": mean + 0.1}


@pytest.mark.parametrize("by", [-0.01, 0.01])
def test_bounds_of_cpu_memory_and_of_sealing(by: float) -> None:
    whole = report_of(measured("stock", 0, 1.0))
    ratios = {"dump_seconds": 2 + by, "restore_seconds": 2 + by, "stored_bytes": 0.6 + by}
    whole["cpu_memory"] = [
        {
            "workload": "cpu",
            "medium": "tmpfs",
            "ratios": {name: ratio(mean) for name, mean in ratios.items()},
            "contenders": {"ours": {"rss_share": 1.05 + by}},
        }
    ]
    whole["sealing"] = [
        {
            "medium": "tmpfs",
            "ratios": {
                "sealed": {"dump_seconds": ratio(1.1 + by), "restore_seconds": ratio(1.1 - by)}
            },
            "contenders": {
                "packed": {"dump_seconds": 2.0, "restore_seconds": 1.0, "stored_bytes": 10**9}
            },
            "aes_256_gcm": 2 * 10**9,
        }
    ]
    bounds = evaluate(whole)
    assert [each["in_turn"] for each in bounds if "packed alone" in each["name"]] == [1.25, 1.5]
    found = {each["name"]: (each["bound"], each["met"]) for each in bounds}
    assert found == {
        "CPU memory of cpu: dump, stock over ours": (">= 2", by > 0),
        "CPU memory of cpu: restore, stock over ours": (">= 2", by > 0),
        "CPU memory of cpu: stored bytes, ours over stock": ("<= 0.6", by < 0),
        "memory of cpu after the restore, over before": ("<= 1.05", by < 0),
        "sealed dump, over one that is packed alone": ("<= 1.1", by < 0),
        "sealed restore, over one that is packed alone": ("<= 1.1", by > 0),
    }
