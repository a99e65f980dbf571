# SPDX-License-Identifier: Apache-2.0
"""What the demo measured: the JSON file and the table."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from gpustasis.errors import CheckpointError

_OWN_RECORDS = (".log", ".json")  # kept beside the images, no part of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """One demo. Sizes are bytes, times seconds of wall clock.

    backend: "emulator", or the GPU's name. criu: its version.
    gpu_bytes: GPU memory that the driver staged. zero_bytes, lz4_bytes, raw_bytes: how much of it,
    before encoding, was stored as what. stored_bytes, stock_bytes: all files of the checkpoint,
    ours and by stock means. dump_seconds to stock_restore_seconds: criu from start to end.
    driver_*_seconds: the part of ours that the driver took; stock means pay it as well.
    """

    backend: str
    criu: str
    restored_bit_exact: bool
    gpu_bytes: int
    stored_bytes: int
    zero_bytes: int
    lz4_bytes: int
    raw_bytes: int
    dump_seconds: float
    restore_seconds: float
    stock_dump_seconds: float
    stock_restore_seconds: float
    stock_bytes: int
    driver_checkpoint_seconds: float
    driver_restore_seconds: float


def write_report(report: Report, path: Path) -> None:
    """Write the report as JSON, replacing an older one in a single step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(asdict(report), indent=2) + "\n", encoding="utf-8")
    part.replace(path)


def image_bytes(directory: Path) -> int:
    """The bytes of a checkpoint's files, without logs and statistics."""
    files = (path for path in directory.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files if path.suffix not in _OWN_RECORDS)


def read_statistics(directory: Path, stage: str) -> dict[str, Any]:
    """The plugin's record of a stage, "dump" or "restore".

    Raises CheckpointError if it is missing or tells of a failure.
    """
    path = directory / f"gpustasis-{stage}.json"
    try:
        record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"the plugin left no record of the {stage}: {exc}") from exc
    if record.get("result") != "ok" or not record.get("tasks"):
        reason = record.get("error") or "no CUDA process in it"
        raise CheckpointError(f"{path}: the {stage} did not do its work: {reason}")
    return record


def sum_of(record: dict[str, Any], *keys: str) -> float:
    """The sum over a record's tasks of the number that `keys` lead to; 0 where they lead
    nowhere."""
    total = 0.0
    for task in record["tasks"]:
        value: Any = task
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        total += float(value or 0)
    return total


def table_of(report: Report, *, emulated: bool) -> Table:
    """Ours and stock side by side, for people."""
    where = "EMULATOR, not a GPU" if emulated else report.backend
    table = Table(title=f"{_mib(report.gpu_bytes)} of GPU memory  ({where})", show_header=True)
    table.add_column(f"criu {report.criu}")
    table.add_column("gpustasis", justify="right")
    table.add_column("externalize = false", justify="right")
    at_checkpoint = _seconds(report.driver_checkpoint_seconds)
    at_restore = _seconds(report.driver_restore_seconds)
    for cells in (
        ("checkpoint's size", _mib(report.stored_bytes), _mib(report.stock_bytes)),
        ("dump", _seconds(report.dump_seconds), _seconds(report.stock_dump_seconds)),
        ("  of it the driver's", at_checkpoint, "the same call"),
        ("restore", _seconds(report.restore_seconds), _seconds(report.stock_restore_seconds)),
        ("  of it the driver's", at_restore, "the same call"),
        ("GPU memory that was zero", _mib(report.zero_bytes), ""),
        ("  that lz4 made smaller", _mib(report.lz4_bytes), ""),
        ("  stored as it is", _mib(report.raw_bytes), ""),
    ):
        table.add_row(*cells)
    table.caption = (
        "externalize = false: GPU memory is in CRIU's own images, as with its own CUDA plugin.\n"
        "gpustasis syncs its image to storage before the job ends, CRIU does not sync its images."
    )
    if emulated:
        table.caption += "\nEmulator: no time here says anything of real hardware."
    return table


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s"
