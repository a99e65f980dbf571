# SPDX-License-Identifier: Apache-2.0
"""How long a checkpoint will take: by the last one of the same job, else by a rate that most disks
reach."""

from __future__ import annotations

from dataclasses import dataclass

from gpustasis.dump_time import MARGIN, at_rate
from gpustasis.preemption.records import Record
from gpustasis.preemption.tree import Memory
from gpustasis.text import mib


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimate:
    """seconds: from the signal to the end of the dump. because: what that was made of."""

    seconds: float
    because: str


def estimate(memory: Memory, last: Record | None, rate: int | None = None) -> Estimate:
    """rate: bytes per second, as told; it wins over what `last` says."""
    size = f"{mib(memory.cpu_bytes)} of CPU memory and {mib(memory.gpu_bytes)} of GPU memory"
    if memory.unknown:
        size += f" (not known: {memory.unknown})"
    if rate is None and last is not None and last.memory_bytes > 0:
        share = max(1.0, memory.total / last.memory_bytes)
        return Estimate(
            seconds=last.seconds * share * MARGIN,
            because=f"{size}; the last checkpoint took {last.seconds:.1f} s "
            f"for {mib(last.memory_bytes)}",
        )
    seconds, because = at_rate(memory.total, rate)
    return Estimate(seconds=seconds, because=f"{size} {because}")
