# SPDX-License-Identifier: Apache-2.0
"""What is made of the rounds of a downtime: medians, costs of a GiB, and stock over each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from gpustasis_bench.bench.contenders import STOCK, Variant
from gpustasis_bench.bench.statistics import paired_ratio
from gpustasis_bench.errors import BenchError

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


def without_driver(downtime: float, driver: float) -> float:
    """Of a downtime of one task and GPU with staging, what is not the driver's. driver: its calls
    from lock to unlock, those of the way back too."""
    return downtime - driver


def require_kept(each: Variant, record: dict[str, Any]) -> None:
    """Raises BenchError if staging was dropped in a dump of one that is measured as keeping it."""
    done = {task["staging"] for task in record["tasks"]} - {""}
    if each.contender.plugin.get("staging") in ("keep", "auto") and done != {"kept"}:
        raise BenchError(
            f"{each.name}: staging was {', '.join(sorted(done)) or 'in no task'}, and is measured "
            "as kept: look whether the host has memory for all of it"
        )


def new_bytes(record: Mapping[str, Any]) -> tuple[int, int]:
    """Of the plugin's statistics of a dump: bytes of the chunks that it has stored itself, before
    they were compressed, and bytes of the files that it has written."""
    tasks = record["tasks"]
    plain = sum(task[encoding]["plain_bytes"] for task in tasks for encoding in ("lz4", "raw"))
    return plain, sum(task["file_bytes"] for task in tasks)


def gpu_bytes_of(digests: Sequence[str]) -> int:
    """Of jobs that hold no CPU memory to be hashed."""
    return sum(int(digest.split()[1]) for digest in digests)
