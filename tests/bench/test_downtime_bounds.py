# SPDX-License-Identifier: Apache-2.0
"""The bounds of downtimes and the model beside them, on made-up numbers."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gpustasis_bench.bench.contenders import (
    OURS,
    OURS_BOTH,
    OURS_DIRECT,
    OURS_KEPT,
    OURS_RAM,
    STOCK,
)
from gpustasis_bench.bench.downtime_bounds import evaluate_downtime
from gpustasis_bench.bench.downtime_figures import described
from gpustasis_bench.bench.markdown import bounds_text
from gpustasis_bench.bench.statistics import paired_ratio
from support.bench import made_report

MIB = 1 << 20


def made_up(by: float = 1.0) -> dict[str, Any]:
    """Every bound is met by so much more than it must, and missed with a `by` below 1."""

    def contender(seconds: float, **figures: Any) -> dict[str, Any]:
        one = {
            **dict.fromkeys(("downtime_seconds", "dump_seconds", "restore_seconds"), seconds),
            "cpu_seconds_per_gib": 0.5,
            "host_bytes": 600 * MIB / by,
            "driver_seconds": 0.1,
        }
        return one | {"rounds": {"downtime_seconds": [seconds, seconds]}} | figures

    def ratio(mean: float) -> dict[str, Any]:
        return paired_ratio([mean, mean], [1.0, 1.0]).as_dict()

    ours = {OURS: 4.0, OURS_RAM: 4.0, OURS_DIRECT: 8.0, OURS_BOTH: 8.0}
    every = (STOCK, *ours)
    alone = {name: {"reading_seconds": 2.0} for name in ours}
    for name in (OURS, OURS_DIRECT):
        alone[name]["writing_seconds"] = 3.0
    shapes = [
        {
            "workload": "noise",
            "gpus": gpus,
            "tasks": tasks,
            "rates": "published",
            "gpu_bytes": tasks * gpus * 256 * MIB,
            "fixed_seconds": dict.fromkeys(every, 0.1),
            "fixed_restore_seconds": dict.fromkeys(every, 0.2),
            "fixed_warm_restore_seconds": dict.fromkeys((STOCK, OURS_RAM, OURS_BOTH), 0.15),
            "contenders": {
                name: contender(
                    10.0 if tasks * gpus == 1 else 16.0 / by,
                    restore_seconds=16.0,
                    warm_restore_seconds=14.0,
                    **alone.get(name, {}),
                )
                for name in every
            },
            "ratios": {
                name: {
                    f"{stage}_seconds": ratio(ours.get(name, 1.0) * by)
                    for stage in ("downtime", "dump", "restore", "warm_restore")
                }
                for name in every
            },
        }
        for tasks, gpus in ((1, 1), (8, 1), (1, 8))
    ]
    content = {
        "workload": "finetuning",
        "gpu_bytes": 2048 * MIB,
        "contenders": {
            STOCK: contender(3.0, without_driver_seconds=1.5),
            OURS_RAM: contender(2.0, warm_over_cold=ratio(0.6 / by), drain_cpu_seconds_per_gib=1.0),
            OURS_DIRECT: contender(0.8, reading_seconds=0.2, writing_seconds=0.7),
            OURS_BOTH: contender(0.8),
        },
        "ratios": {
            STOCK: {},
            OURS_RAM: {
                "downtime_seconds": ratio(1.25 * by),
                "without_driver_seconds": ratio(2 * by),
            },
            OURS_DIRECT: {"downtime_seconds": ratio(3.5 * by)},
            OURS_BOTH: {"downtime_seconds": ratio(3.5 * by)},
        },
    }
    second = {
        "downtime_seconds": {"full": 4.0, "incremental": 2.0},
        "without_driver_seconds": {"full": 2.0, "incremental": 1.0},
        "ratio": ratio(2.0),
        "ratio_without_driver": ratio(2.0 * by),
    }
    return {
        "medium": "disk",
        "pairs": 2,
        "shape_pairs": 2,
        "scale": 16.0,
        "size_bytes": 256 * MIB,
        "absent": {},
        "rates": {"staged": {"down": 2e9, "up": 7e9}, "direct": {"down": 9e9, "up": 11e9}},
        "shapes": shapes,
        "contents": [content],
        "second": [
            {
                "workload": "qlora",
                "gpu_bytes": 2048 * MIB,
                "contenders": {OURS: second, OURS_KEPT: second, OURS_RAM: second},
            }
        ],
        "neighbours": [
            {
                "workload": "finetuning",
                "contender": OURS_RAM,
                "rate_limit_bytes": 10**8,
                "window_seconds": 20.0,
                "window_bytes_per_second": 10**7,
                "window_cpu_seconds": 1.0,
                "drain_seconds": 40.0,
                "drain_cpu_seconds": 3.0,
                "ratio": ratio(1 - 0.05 / by),
            }
        ],
    }


@pytest.mark.parametrize(("by", "met"), [(1.01, True), (0.99, False)])
def test_bounds_are_met_or_missed_as_they_were_measured(by: float, met: bool) -> None:
    bounds = evaluate_downtime(made_report(made_up(by)))
    assert len(bounds) == 4 + 4 + 4 + 8 + 2 + 1 + 3 + 1 + 1
    for bound in bounds:
        assert (bound["met"], bound["not_measured"]) == (met, None), bound["name"]
        assert bound["measured"] is not None
    # What could be reached here stands beside it; these two nothing limits that is known.
    unlimited = [each for each in bounds if each["best"] is None]
    assert [each["name"] for each in unlimited] == [
        "host memory beyond the job, direct dump of fine-tuning, MiB",
        "slowdown of programs on all processors beside a drain, percent",
    ]
    for each in unlimited:
        assert (each["parts"], each["least_of"], each["in_turn"]) == (None, None, None)


def test_what_was_not_measured_says_why_and_is_not_met() -> None:
    whole = made_up(2.0)
    report = made_report(whole)
    assert all(bound["met"] for bound in evaluate_downtime(report))
    cut = copy.deepcopy(whole)
    for part in (*cut["shapes"], *cut["contents"], *cut["second"]):
        part["contenders"].pop(OURS_RAM, None)
        part.get("ratios", {}).pop(OURS_RAM, None)
    cut["neighbours"] = []
    cut["absent"] = {OURS_RAM: "the plugin of this build has no setting 'tier'"}
    bounds = {each["name"]: each for each in evaluate_downtime(made_report(cut))}
    missing = [each for each in bounds.values() if each["not_measured"]]
    assert len(missing) == 2 + 2 + 2 + 1 + 1 + 1 + 1
    for each in missing:
        assert (each["met"], each["measured"]) == (False, None)
        assert "has no setting 'tier'" in each["not_measured"]
    nothing = evaluate_downtime(made_report({}, "downtime: the emulator did not start"))
    assert len(nothing) == len(bounds)
    for each in nothing:
        assert not each["met"]
        assert each["not_measured"].endswith("downtime: the emulator did not start")
    assert evaluate_downtime(made_report({}) | {"downtime": None}) == []


def test_what_was_measured_to_be_better_shows_no_limit() -> None:
    """Neither does a best that meets the bound; of one that misses it, as what was measured, it is
    said."""
    bound = evaluate_downtime(made_report(made_up(0.5)))[0]
    assert bound["bound"] == ">= 1.25" and not bound["met"]
    for measured, in_turn, said in ((0.6, 0.7, True), (0.8, 0.7, False), (0.6, 1.3, False)):
        whole = made_report(made_up()) | {"bounds": [bound | {"measured": measured}]}
        whole["bounds"][0]["in_turn"] = in_turn
        text = bounds_text(whole["bounds"])
        assert ("**no**, not possible here" in text) == said
        assert f"1 missed, {int(said)} of them not possible here" in text


def test_rounds_that_were_apart_have_an_interval_of_their_own() -> None:
    """Of the same spread it does not matter which round stands beside which."""
    whole = made_up()
    one, many = (
        shape["contenders"][OURS]["rounds"]["downtime_seconds"] for shape in whole["shapes"][:2]
    )
    one[:], many[:] = [9.0, 10.0, 11.0], [13.0, 14.0, 15.0]
    title = (
        f"downtime of 8 tasks with a GPU each over that of one with one, same memory each, {OURS}"
    )
    found = []
    for _ in range(2):
        bounds = {each["name"]: each for each in evaluate_downtime(made_report(whole))}
        found.append((bounds[title]["low"], bounds[title]["measured"], bounds[title]["high"]))
        many.reverse()
    assert found[0] == found[1]
    # Welch: 0.338 ± t of 3 degrees of freedom, 3.182, times 0.0712, of the logarithms. A normal
    # quantile of 1.96 makes it 1.220 to 1.612.
    assert found[0] == pytest.approx((1.118, 1.402, 1.759), abs=0.01)


def test_the_slowdown_of_neighbours_is_proven_by_its_own_interval() -> None:
    whole = made_up()
    for low, high, proven in ((0.96, 0.98, True), (0.94, 0.98, False)):
        whole["neighbours"][0]["ratio"] = {"mean": 0.97, "low": low, "high": high, "pairs": 2}
        bound = evaluate_downtime(made_report(whole))[-1]
        assert (bound["measured"], bound["met"], bound["proven"]) == (3.0, True, proven)
        assert (bound["low"], bound["high"]) == (2.0, round(100 * (1 - low), 2))


def test_ratios_are_stock_over_each_pair_by_pair() -> None:
    values: dict[str, dict[str, list[float]]] = {
        STOCK: {
            "cpu_seconds": [1.0, 1.0],
            "downtime_seconds": [6.0, 8.0],
            "restore_seconds": [9.0, 9.0],
            "warm_restore_seconds": [6.0, 2.0],
            "without_driver_seconds": [2.0, 2.0],
        },
        OURS_RAM: {
            "cpu_seconds": [1.0, 3.0],
            "drain_cpu_seconds": [4.0, 8.0],
            "downtime_seconds": [2.0, 4.0],
            "restore_seconds": [3.0, 6.0],
            "warm_restore_seconds": [1.5, 2.0],
            "without_driver_seconds": [1.0, 0.0],
        },
    }
    found = described(values, 2048 * MIB)
    ratios = found["ratios"][OURS_RAM]
    assert ratios.pop("without_driver_seconds") is None  # one is no time
    assert {figure: (one["mean"], one["pairs"]) for figure, one in ratios.items()} == {
        "downtime_seconds": (2.4495, 2),  # the root of 3 times 2
        "restore_seconds": (2.1213, 2),
        "warm_restore_seconds": (2.0, 2),
    }
    assert {one["mean"] for one in found["ratios"][STOCK].values()} == {1.0}
    ours = found["contenders"][OURS_RAM]
    assert ours["warm_over_cold"]["mean"] == 0.4082
    assert "warm_over_cold" not in found["contenders"][STOCK]
    assert (ours["downtime_seconds"], ours["cpu_seconds_per_gib"]) == (3.0, 1.0)
    assert ours["drain_cpu_seconds_per_gib"] == 3.0
    assert ours["rounds"] == values[OURS_RAM]
