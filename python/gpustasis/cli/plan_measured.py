# SPDX-License-Identifier: Apache-2.0
"""Figures of a plan from checkpoints that a job has left: what is recorded beside their images."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis.criu.images import (
    RESTORE_STATISTICS_NAME,
    STATISTICS_NAME,
    dump_figures,
    restore_figures,
)
from gpustasis.criu.statistics import Stage, Statistics, find_statistics
from gpustasis.errors import ImageError
from gpustasis.files import open_regular
from gpustasis.image.inspection import Inspection, inspect_directory

_LIMIT = 1 << 20  # bytes of CRIU's statistics, which are less than a hundred


@dataclass(slots=True)
class Measured:
    """values: by key of a figure. emulated: a driver emulator took part, so times of a GPU are not
    in it. notes: what was not found, and why."""

    values: dict[str, object] = field(default_factory=dict)
    emulated: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rank:
    """One checkpoint. Times in seconds; restore_s: None, it was not restored there. gpus: UUIDs
    of those that it had memory on."""

    drain_s: float
    downtime_s: float
    restore_s: float | None
    size: int
    gpus: frozenset[str]
    emulated: bool


def measure(directories: tuple[Path, ...], gpus: float | None) -> Measured:
    """Of one checkpoint of each of some ranks: the slowest rank counts, and the mean size of a GPU.

    gpus: of the job; None: those of these checkpoints. Raises ImageError if one cannot be read or
    says nothing of its dump.
    """
    ranks = [_rank(path) for path in dict.fromkeys(path.resolve() for path in directories)]
    slowest = max(ranks, key=lambda rank: rank.drain_s + rank.downtime_s)
    seen = len(frozenset[str]().union(*(rank.gpus for rank in ranks))) or len(ranks)
    found = Measured(emulated=any(rank.emulated for rank in ranks))
    size = sum(rank.size for rank in ranks) * ((gpus or seen) / seen)
    found.values |= {
        "gpus": seen,
        "disk.drain_s": slowest.drain_s,
        "disk.downtime_s": slowest.downtime_s,
        "disk.size_gb": size / 1e9,
    }
    restored = [rank.restore_s for rank in ranks if rank.restore_s is not None]
    if restored:
        found.values["disk.restore_s"] = max(restored)
    if len(restored) < len(ranks):
        missing = len(ranks) - len(restored)
        found.notes.append(
            f"{missing} of {len(ranks)} checkpoints were not restored where they are"
        )
    return found


def _rank(directory: Path) -> _Rank:
    inspection = inspect_directory(directory)
    dumped = _require(directory, "dump")
    criu = dump_figures(_read(directory / STATISTICS_NAME))
    if not {"freezing_time", "frozen_time"} <= criu.keys():
        raise ImageError(
            f"{directory / STATISTICS_NAME}: does not say how long the job stood still"
        )
    drain_s = sum(task.phases_ms.get("lock", 0.0) for task in dumped.tasks) / 1000
    stopped_s = (criu["freezing_time"] + criu["frozen_time"]) / 1e6
    restore_s = _restore_s(directory)
    if not all(map(math.isfinite, (drain_s, stopped_s, restore_s or 0.0))):
        raise ImageError(f"{directory}: a time that is recorded here is no number")
    return _Rank(
        drain_s=drain_s,
        downtime_s=max(0.0, stopped_s - drain_s),
        restore_s=restore_s,
        size=inspection.gpu_image_bytes + inspection.cpu_image_bytes + inspection.other_bytes,
        gpus=_gpus(inspection),
        emulated=dumped.emulated,
    )


def _gpus(inspection: Inspection) -> frozenset[str]:
    """Those that a process had memory on; where that is not known, those that it could see."""
    used = [gpu for one in inspection.processes if one.cuda is not None for gpu in one.cuda.gpus]
    if not used or any(gpu.memory_bytes is None for gpu in used):
        return frozenset(gpu.uuid for gpu in inspection.needed_gpus())
    return frozenset(gpu.uuid for gpu in used if gpu.memory_bytes)


def _restore_s(directory: Path) -> float | None:
    """CRIU's own time, and the plugin's, which comes after it."""
    path = directory / RESTORE_STATISTICS_NAME
    restored = find_statistics(directory, "restore")
    if restored is None or not restored.succeeded or not path.exists():
        return None
    criu = restore_figures(_read(path))
    if "restore_time" not in criu:
        raise ImageError(f"{path}: does not say how long the restore took")
    phases = sum(restored.phases_ms.values())
    phases += sum(sum(task.phases_ms.values()) for task in restored.tasks)
    return criu["restore_time"] / 1e6 + phases / 1000


def _require(directory: Path, stage: Stage) -> Statistics:
    found = find_statistics(directory, stage)
    if found is None or not found.succeeded:
        raise ImageError(
            f"{directory}: no {stage} of gpustasis that came to its end is recorded here"
        )
    return found


def _read(path: Path) -> bytes:
    try:
        with open_regular(path) as file:
            return file.read(_LIMIT)
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
