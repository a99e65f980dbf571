"""Medians, spreads, ratios, and the bounds that follow."""

from __future__ import annotations

from typing import Any

import pytest

from gpustasis_bench.bench.bounds import evaluate, in_turn_seconds, unavoidable_seconds
from gpustasis_bench.bench.summary import Round, spread, summarise

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
    }
    return Round(contender=contender, pair=pair, dump_seconds=dump, **values | fields)


def test_spread() -> None:
    found = spread([3.0, 1.0, 2.0, 5.0, 4.0])
    assert (found["least"], found["greatest"]) == (1.0, 5.0)
    assert found["relative"] == pytest.approx((4 - 2) / 2 / 3, abs=1e-4)
    assert spread([7.0]) == {"least": 7.0, "greatest": 7.0, "relative": 0.0}
    with pytest.raises(ValueError, match="no value"):
        spread([])


def test_figures_are_medians_and_ratios_are_of_medians() -> None:
    rounds = [measured("stock", pair, dump) for pair, dump in enumerate((9.0, 4.0, 6.0))]
    rounds += [
        measured("ours", pair, dump, stored_bytes=250)
        for pair, dump in enumerate((2.0, 100.0, 1.0))
    ]
    stock, ours = summarise(rounds, "stock")
    assert (stock["contender"], stock["pairs"], stock["dump_seconds"]) == ("stock", 3, 6.0)
    assert stock["ratios"]["dump_seconds"] == 1.0
    assert ours["dump_seconds"] == 2.0
    assert ours["ratios"]["dump_seconds"] == 3.0  # stock over ours
    assert ours["ratios"]["stored_bytes"] == 0.25  # ours over stock
    assert ours["peak_rss_bytes"] == 20
    assert ours["driver_seconds"] == {"dump": 0.1, "restore": 0.2}
    assert [each["dump_seconds"] for each in ours["rounds"]] == [2.0, 100.0, 1.0]


def test_without_stock_there_is_no_ratio() -> None:
    (ours,) = summarise([measured("ours", 0, 1.0)], "stock")
    assert set(ours["ratios"].values()) == {None}


def report_of(*rounds: Round, limits: dict[str, Any] | None = None) -> dict[str, Any]:
    return {
        "results": summarise(rounds, "stock"),
        "second_checkpoints": [],
        "chains": [],
        "limits": limits,
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


def test_a_bound_that_cannot_be_measured_is_not_met() -> None:
    found = evaluate(report_of(measured("ours", 0, 1.0)))
    assert [(each["measured"], each["met"]) for each in found] == [(None, False)] * 3


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
