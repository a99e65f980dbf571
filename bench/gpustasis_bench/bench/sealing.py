# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that are sealed while they are made, beside packed ones, and beside those of stock
CRIU that another program encrypts afterwards."""

from __future__ import annotations

from statistics import median
from typing import Any

from gpustasis.criu.plugin import Setting
from gpustasis_bench.bench import cpu_memory
from gpustasis_bench.bench.ciphers import Keys, aes_gcm_rate, end_agent, make_keys
from gpustasis_bench.bench.contenders import CONTENDERS, STOCK, Contender
from gpustasis_bench.bench.content import Workload
from gpustasis_bench.bench.course import Course
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.statistics import paired_ratio

PACKED, SEALED = "packed", "sealed"
TIMES = ("dump_seconds", "restore_seconds")
_FIGURES = (*TIMES, "frozen_seconds", "stored_bytes", "rss_share")


def measure_sealing(
    course: Course, workload: Workload, medium: Medium, pairs: int, size: int, seed: int
) -> dict[str, Any]:
    """`pairs` rounds of each on a process with CUDA that holds `size` bytes, half of them its
    GPU's, in turns. ratios: each one over packed, for times and sizes. aes_256_gcm: bytes a second
    that all cores encrypt.

    Raises BenchError, UnsupportedError without one of the programs, WrongMemoryError if the memory
    is not what it was.
    """
    keys = make_keys(course.work / f"keys-{medium.name}")
    try:
        rate = aes_gcm_rate()
        contenders = contenders_with(keys)
        with cpu_memory.target_of(course, False, size, seed) as target:
            course.say(workload.name)
            values = cpu_memory.rounds(course, target, medium, contenders, pairs, size // 2)
    finally:
        end_agent(keys)
    ratios = {
        name: {
            figure: paired_ratio(values[name][figure], values[PACKED][figure]).as_dict()
            for figure in (*TIMES, "stored_bytes")
        }
        for name in values
        if name != PACKED
    }
    return {
        "workload": workload.name,
        "bytes": size,
        "medium": medium.name,
        "pairs": pairs,
        "aes_256_gcm": rate,
        "versions": {name: cipher.version() for name, cipher in keys.ciphers.items()},
        "contenders": {
            name: {figure: round(median(found[figure]), 6) for figure in _FIGURES}
            | {"rounds": {figure: found[figure] for figure in _FIGURES}}
            for name, found in values.items()
        },
        "ratios": ratios,
    }


def contenders_with(keys: Keys) -> tuple[Contender, ...]:
    """Packed, sealed, and stock CRIU with each program that encrypts."""
    ours: dict[str, Setting] = {"cpu_memory": "ours", "layout": "packed"}
    recipients: dict[str, Setting] = {
        "recipients": [str(keys.certificate)],
        "private_key": str(keys.key),
    }
    stock = CONTENDERS[STOCK]
    return (
        Contender(name=PACKED, plugin=ours),
        Contender(name=SEALED, plugin=ours | recipients),
        *(
            Contender(name=f"stock, {name}", plugin=stock.plugin, codec=cipher)
            for name, cipher in keys.ciphers.items()
        ),
    )
