# SPDX-License-Identifier: Apache-2.0
"""What the plugin says of a dump or a restore: gpustasis-dump.json and gpustasis-restore.json."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from gpustasis.criu.images import inventory_plugins
from gpustasis.errors import ImageError
from gpustasis.files import open_regular

Stage = Literal["dump", "restore"]

STATISTICS_VERSION = 1
_NAMES = frozenset(("cuda_plugin", "gpustasis"))  # of the plugin, in CRIU's inventory
_LIMIT = 64 << 20  # bytes of the file; of one process it says some kilobytes
EMULATOR = "emulator"


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskStatistics:
    """One CUDA process. Sizes in bytes; times by phase in milliseconds. same_bytes: memory that an
    earlier checkpoint holds already."""

    pid: int
    image_pid: int
    externalized: bool
    staged_bytes: int
    same_bytes: int
    file_bytes: int
    phases_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuMemoryStatistics:
    """The CPU memory of one process. Sizes in bytes. left_because: why all of it was left to CRIU;
    "" if an image of ours holds it. stored_twice_bytes: what CRIU has dumped as well."""

    pid: int
    image_pid: int
    left_because: str
    plain_bytes: int
    same_bytes: int
    file_bytes: int
    stored_twice_bytes: int
    phases_ms: dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statistics:
    """The whole dump or restore. backend: "driver", or "emulator" when no GPU took part.

    full_because: of a dump without a parent, why it has none; "" else.
    """

    succeeded: bool
    error: str
    backend: str
    full_because: str
    tasks: tuple[TaskStatistics, ...]
    cpu_memory: tuple[CpuMemoryStatistics, ...]
    phases_ms: dict[str, float]

    @property
    def emulated(self) -> bool:
        return self.backend == EMULATOR

    @property
    def staged_bytes(self) -> int:
        return sum(task.staged_bytes for task in self.tasks)

    @property
    def same_bytes(self) -> int:
        return sum(task.same_bytes for task in self.tasks)

    @property
    def file_bytes(self) -> int:
        return sum(task.file_bytes for task in self.tasks)


def statistics_path(images: Path, stage: Stage) -> Path:
    """Where the plugin writes them."""
    return images / statistics_name(stage)


def statistics_name(stage: Stage) -> str:
    """The name of that file in an image directory."""
    return f"gpustasis-{stage}.json"


def find_statistics(images: Path, stage: Stage) -> Statistics | None:
    """The statistics in `images`; None if there are none. Raises ImageError if damaged."""
    path = statistics_path(images, stage)
    try:
        with open_regular(path) as file:
            raw = file.read(_LIMIT + 1)
    except FileNotFoundError:
        return None
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc}") from exc
    if len(raw) > _LIMIT:
        raise ImageError(f"{path}: is longer than {_LIMIT} bytes")
    return parse_statistics(raw, str(path))


_NOT_OURS = "criu failed"  # what the plugin says of an error that criu's log explains


def failures(found: Statistics | None, images: Path, status: int, logged: list[str]) -> list[str]:
    """What the plugin says has failed. found: its statistics of that run. status: criu's exit
    status. logged: lines in criu's log that look like errors of ours.

    criu logs names of files as they are, and one may hold such lines. So they are not believed
    where criu has ended well and the plugin says the same, or has had nothing to do.
    """
    if found is not None and not found.succeeded:
        is_known = status != 0 and found.error == _NOT_OURS
        return logged or ([found.error] if found.error and not is_known else [])
    if status != 0 or not logged:
        return logged
    is_well = found is not None or _NAMES.isdisjoint(inventory_plugins(images))
    return [] if is_well else logged


def parse_statistics(file: bytes, path: str) -> Statistics:
    """The same from the content of the file; `path` is for messages. Raises ImageError."""
    try:
        raw = json.loads(file.decode("utf-8"))
    except (ValueError, RecursionError) as exc:  # ValueError: not UTF-8, or not JSON
        raise ImageError(f"cannot read {path}: {exc}") from exc
    found = raw.get("version") if isinstance(raw, dict) else None
    if found != STATISTICS_VERSION:
        raise ImageError(f"{path}: version {found!r}, this build reads {STATISTICS_VERSION}")
    try:
        return Statistics(
            succeeded=raw["result"] == "ok",
            error=str(raw["error"]),
            backend=str(raw["backend"]),
            full_because=str(raw.get("full_because", "")),
            tasks=tuple(_task(task) for task in raw["tasks"]),
            cpu_memory=tuple(_cpu_memory(task) for task in raw.get("cpu_memory", ())),
            phases_ms=_phases(raw["phases_ms"]),
        )
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as exc:
        raise ImageError(f"{path} is malformed: {exc!r}") from exc


def _task(raw: dict[str, Any]) -> TaskStatistics:
    return TaskStatistics(
        pid=int(raw["pid"]),
        image_pid=int(raw["image_pid"]),
        externalized=bool(raw["externalized"]),
        staged_bytes=int(raw["staged_bytes"]),
        same_bytes=int(raw["ref"]["plain_bytes"]) if "ref" in raw else 0,
        file_bytes=int(raw["file_bytes"]),
        phases_ms=_phases(raw["phases_ms"]),
    )


def _cpu_memory(raw: dict[str, Any]) -> CpuMemoryStatistics:
    return CpuMemoryStatistics(
        pid=int(raw["pid"]),
        image_pid=int(raw["image_pid"]),
        left_because=str(raw["left_because"]),
        plain_bytes=int(raw["bytes"]),
        same_bytes=int(raw["ref"]["plain_bytes"]),
        file_bytes=int(raw["file_bytes"]),
        stored_twice_bytes=int(raw["stored_twice_bytes"]),
        phases_ms=_phases(raw["phases_ms"]),
    )


def _phases(raw: dict[str, Any]) -> dict[str, float]:
    return {str(name): float(milliseconds) for name, milliseconds in raw.items()}
