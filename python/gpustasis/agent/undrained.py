# SPDX-License-Identifier: Apache-2.0
"""What checkpoints that are in memory are still to take on the disk. This reads their files: nobody
does it with a lock held that others wait for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gpustasis.agent.operations import Figures, Operation
from gpustasis.agent.space import disk_used
from gpustasis.criu.statistics import find_statistics
from gpustasis.draining.drain import can_be_drained
from gpustasis.errors import CheckpointError
from gpustasis.image.arena import Tier


def in_memory(operations: Iterable[Operation]) -> list[tuple[Operation, Figures]]:
    """Those that are there alone."""
    found = ((one, one.figures) for one in operations)
    return [(one, figures) for one, figures in found if figures and figures.tier == Tier.LOCAL]


def left_to_drain(operations: Iterable[Operation]) -> dict[str, int]:
    """By the id of each that is in memory: bytes, at most, beside what it has on the disk."""
    return {one.id: _left(Path(one.place), figures) for one, figures in in_memory(operations)}


def total(operations: Iterable[Operation], left: Mapping[str, int]) -> int:
    """Of all that are in memory now. left: what left_to_drain() has found before; one that has come
    since counts in full. This reads no files."""
    return sum(left.get(one.id, figures.size_bytes) for one, figures in in_memory(operations))


def _left(place: Path, figures: Figures) -> int:
    if not can_be_drained(place):
        return 0
    same = _same_bytes(place) if figures.incremental else 0
    return max(0, figures.size_bytes - same - disk_used(place))


def _same_bytes(place: Path) -> int:
    """Of its memory, what is in those that it is built on already; 0 too if that is not known."""
    try:
        statistics = find_statistics(place, "dump")
    except CheckpointError:
        return 0
    if statistics is None:
        return 0
    return statistics.same_bytes + sum(one.same_bytes for one in statistics.cpu_memory)
