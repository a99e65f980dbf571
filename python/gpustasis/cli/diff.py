"""`gpustasis diff A B`: what changed in GPU memory from one checkpoint to another."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from gpustasis.archive.opening import open_files
from gpustasis.cli.options import checkpoint_argument
from gpustasis.image.difference import Amounts, Difference, TaskDifference, compare_files
from gpustasis.image.lock import allow_many_files

# Of the JSON form. A key that is there keeps its meaning; new ones may come.
DIFF_VERSION = 1
_FILE_WIDTH = 160  # columns, where no terminal says how many there are
_COLUMNS = (
    ("same", "same"),
    ("changed", "changed"),
    ("moved", "moved"),
    ("only_in_b", "only in B"),
    ("only_in_a", "only in A"),
)


@click.command("diff")
@checkpoint_argument("a")
@checkpoint_argument("b")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(a: Path, b: Path, as_json: bool) -> None:
    """Say what changed in GPU memory from checkpoint A to checkpoint B, by task and region.
    Each is an image directory or an archive of a container engine.

    Chunks are compared by their hashes, at the same address: only the indexes are read. "moved" is
    what is not as in A at its address but elsewhere in A. Shares are of B's memory.
    """
    allow_many_files()
    with open_files(a) as before, open_files(b) as after:
        found = compare_files(before, after)
    if as_json:
        click.echo(json.dumps(_to_json(a, b, found), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(_table(a, b, found))
    if found.seconds is not None:
        console.print(
            f"{found.seconds:.1f} s between the two: {_mib(found.amounts.fresh)} that A does not "
            f"have, {_rate(found):.1f} MiB/s",
            highlight=False,
        )


def _table(a: Path, b: Path, found: Difference) -> Table:
    title = f"from {a} (A) to {b} (B), chunks of {found.chunk_size // 1024} KiB"
    table = Table(title=escape(title), title_justify="left")
    table.add_column("Memory")
    for _, head in (("size", "MiB in B"), *_COLUMNS):
        table.add_column(head, justify="right")
    for task in found.tasks:
        table.add_row(_task_text(task), *_cells(task.amounts))
        for region in task.regions:
            place = f"  {region.address:x}-{region.address + region.length:x}"
            table.add_row(place, *_cells(region.amounts))
    table.add_section()
    table.add_row("total", *_cells(found.amounts))
    return table


def _task_text(task: TaskDifference) -> str:
    if task.in_a and task.in_b:
        return f"task {task.pid}"
    return f"task {task.pid}, only in {'A' if task.in_a else 'B'}"


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
        "version": DIFF_VERSION,
        "a": str(a),
        "b": str(b),
        "chunk_bytes": found.chunk_size,
        "seconds": found.seconds,
        "fresh_mib_per_s": _rate(found) if known else None,
        "total": _amounts(found.amounts),
        "tasks": [
            {
                "pid": task.pid,
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


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
