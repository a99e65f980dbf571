# SPDX-License-Identifier: Apache-2.0
"""`gpustasis diff A B`: what changed in memory from one checkpoint to another."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

import gpustasis
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import checkpoint_argument
from gpustasis.image.difference import Amounts, Difference, TaskDifference
from gpustasis.image.directory import allow_many_files
from gpustasis.text import mib

_MEMORY = {"gpu": "GPU memory", "cpu": "CPU memory"}
_COLUMNS = (
    ("same", "same"),
    ("changed", "changed"),
    ("moved", "moved"),
    ("only_in_b", "only in B"),
    ("only_in_a", "only in A"),
)


@click.command("diff", cls=Command)
@checkpoint_argument("a")
@checkpoint_argument("b")
def command(a: Path, b: Path) -> None:
    """Say what changed in GPU memory, and in CPU memory that gpustasis stored, from checkpoint A to
    checkpoint B, by task and region. Each is an image directory or an archive of a container
    engine.

    Chunks are compared by their hashes, at the same address: only the indexes are read. "moved" is
    what is not as in A at its address but elsewhere in A. Shares are of B's memory.
    """
    allow_many_files()
    found = gpustasis.open(a).diff(b)
    output.answer(_to_json(a, b, found), lambda: _show(a, b, found))


def _show(a: Path, b: Path, found: Difference) -> None:
    rows: list[list[str]] = []
    for task in found.tasks:
        rows.append([_task_text(task), *_cells(task.amounts)])
        for region in task.regions:
            place = f"  {region.address:x}-{region.address + region.length:x}"
            rows.append([place, *_cells(region.amounts)])
    output.grid(
        ("Memory", "MiB in B", *(head for _, head in _COLUMNS)),
        [rows, [["total", *_cells(found.amounts)]]],
        title=f"from {a} (A) to {b} (B), chunks of {found.chunk_size // 1024} KiB",
    )
    if found.seconds is not None:
        output.say(
            f"{found.seconds:.1f} s between the two: {mib(found.amounts.fresh)} that A does not "
            f"have, {_rate(found):.1f} MiB/s"
        )


def _task_text(task: TaskDifference) -> str:
    what = f"task {task.pid}, {_MEMORY[task.kind]}"
    if task.in_a and task.in_b:
        return what
    return f"{what}, only in {'A' if task.in_a else 'B'}"


def _cells(amounts: Amounts) -> list[str]:
    cells = [f"{amounts.in_b / 2**20:.1f}"]
    for name, _ in _COLUMNS:
        size: int = getattr(amounts, name)
        share = f" {100 * size / amounts.in_b:3.0f} %" if amounts.in_b else ""
        has_share = name != "only_in_a"  # which is no part of B
        cells.append(f"{size / 2**20:.1f}{share if has_share else ''}" if size else "")
    return cells


def _rate(found: Difference) -> float:
    """MiB/s; 0 if the time is not known."""
    return found.amounts.fresh / 2**20 / found.seconds if found.seconds else 0.0


def _to_json(a: Path, b: Path, found: Difference) -> dict[str, Any]:
    known = found.seconds is not None
    return {
        "a": str(a),
        "b": str(b),
        "chunk_bytes": found.chunk_size,
        "seconds": found.seconds,
        "fresh_mib_per_s": _rate(found) if known else None,
        "total": _amounts(found.amounts),
        "tasks": [
            {
                "pid": task.pid,
                "memory": task.kind,
                "in_a": task.in_a,
                "in_b": task.in_b,
                **_amounts(task.amounts),
                "regions": [
                    {
                        "address": region.address,
                        "length": region.length,
                        **_amounts(region.amounts),
                    }
                    for region in task.regions
                ],
            }
            for task in found.tasks
        ],
    }


def _amounts(amounts: Amounts) -> dict[str, Any]:
    sizes = {f"{name}_bytes": size for name, size in asdict(amounts).items()}
    shares = {
        f"{name}_share": (size / amounts.in_b if amounts.in_b else 0.0)
        for name, size in asdict(amounts).items()
        if name != "only_in_a"
    }
    return sizes | {"fresh_bytes": amounts.fresh} | shares
