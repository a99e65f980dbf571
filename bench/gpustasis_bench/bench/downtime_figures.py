# SPDX-License-Identifier: Apache-2.0
"""What is made of the rounds of a downtime: medians, costs of a GiB, and stock over each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpustasis_bench.bench.contenders import STOCK
from gpustasis_bench.bench.statistics import paired_ratio

_RATIOS = (
    *("downtime_seconds", "without_driver_seconds", "dump_seconds"),
    *("restore_seconds", "warm_restore_seconds"),
)


def described(values: Mapping[str, Mapping[str, list[float]]], gpu_bytes: int) -> dict[str, Any]:
    """ratios: stock over each, pair by pair; None where there is none."""
    gib = gpu_bytes / 2**30
    contenders = {}
    for name, figures in values.items():
        one: dict[str, Any] = {figure: round(median(found), 6) for figure, found in figures.items()}
        one["cpu_seconds_per_gib"] = round(one["cpu_seconds"] / gib, 4)
        if "drain_cpu_seconds" in one:
            one["drain_cpu_seconds_per_gib"] = round(one["drain_cpu_seconds"] / gib, 4)
        if "warm_restore_seconds" in one and name != STOCK:
            warm = ratio_of(figures["warm_restore_seconds"], figures["restore_seconds"])
            one["warm_over_cold"] = warm
        contenders[name] = one | {"rounds": dict(figures)}
    stock = values[STOCK]
    ratios = {
        name: {
            figure: ratio_of(stock[figure], figures[figure])
            for figure in _RATIOS
            if figure in figures
        }
        for name, figures in values.items()
    }
    return {"gpu_bytes": gpu_bytes, "contenders": contenders, "ratios": ratios}


def ratio_of(
    above: Sequence[float], below: Sequence[float]
) -> dict[str, float | int | None] | None:
    """None where a value is not greater than 0: the driver alone took longer than all."""
    if min(*above, *below) <= 0:
        return None
    return paired_ratio(above, below).as_dict()


def without_driver(row: Mapping[str, float]) -> float:
    """Of a downtime of one task and GPU with staging, what is not the driver's: all of its calls
    were timed, those of the way back too."""
    return row["downtime_seconds"] - row["driver_seconds"]
