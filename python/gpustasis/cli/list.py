# SPDX-License-Identifier: Apache-2.0
"""`gpustasis list STORE`: the checkpoints in a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.image.arena import Tier
from gpustasis.image.store import Listed, list_store
from gpustasis.text import mib

_ID_SHOWN = 12  # digits
_TITLES = ("NAME", "TAKEN", "ID", "PARENT", "TASKS", "MEMORY", "STORED", "STATE")


@click.command("list", cls=Command)
@click.argument("store", type=click.Path(file_okay=False, exists=True, path_type=Path))
def command(store: Path) -> None:
    """List the checkpoints in STORE, oldest first.

    STORE is a directory whose subdirectories are checkpoints. TASKS and MEMORY count what
    gpustasis stored, GPU memory and CPU memory; what CRIU's own images hold is in STORED only.
    Indexes are read, memory is not: `gpustasis verify STORE` does that.
    """
    found = list_store(store)
    output.answer(
        {"store": store, "entries": [_fields(one) for one in found]},
        lambda: output.table(_TITLES, map(_row, found)),
    )


def _fields(one: Listed) -> dict[str, Any]:
    entry = one.entry
    return {
        "name": entry.name,
        "checkpoint_id": entry.checkpoint_id,
        "parent_id": entry.parent_id,
        "taken": entry.taken,
        "tasks": None
        if entry.manifest is None
        else len({task.pid for task in entry.manifest.tasks}),
        "memory_bytes": one.memory_bytes,
        "stored_bytes": entry.size,
        "state": entry.tier.value,
        "peer": one.peer,
        "complete": not one.problem,
        "problem": one.problem,
    }


def _row(one: Listed) -> tuple[object, ...]:
    entry = one.entry
    return (
        entry.name,
        "-" if entry.taken is None else f"{entry.taken:%Y-%m-%d %H:%M:%S}",
        _short(entry.checkpoint_id),
        _short(entry.parent_id),
        "-" if entry.manifest is None else len({task.pid for task in entry.manifest.tasks}),
        "-" if one.memory_bytes is None else mib(one.memory_bytes),
        mib(entry.size),
        one.problem or _whole(one),
    )


def _whole(one: Listed) -> str:
    if one.entry.tier == Tier.DURABLE:
        return "complete"
    return f"complete, in memory here and on {one.peer}" if one.peer else "complete, in memory only"


def _short(checkpoint_id: bytes | None) -> str:
    return "-" if checkpoint_id is None else checkpoint_id.hex()[:_ID_SHOWN]
