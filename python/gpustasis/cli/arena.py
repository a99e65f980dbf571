# SPDX-License-Identifier: Apache-2.0
"""`gpustasis arena`: the memory that dumps go into first."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import Any

import click

from gpustasis.cli import output
from gpustasis.cli.framework import Command, Group
from gpustasis.cli.options import Size
from gpustasis.draining.recycle import recycle
from gpustasis.draining.room import ARENA, contents_of, empty_pool, tier_in
from gpustasis.draining.room import create as create_arena
from gpustasis.draining.room import discard as discard_checkpoint
from gpustasis.errors import ImageError
from gpustasis.text import mib, plural

_arena_option = click.option(
    "--arena",
    type=click.Path(path_type=Path),
    default=ARENA,
    show_default=True,
    help="The directory that the key `arena` of the plugin's configuration names.",
)


@click.group("arena", cls=Group)
def command() -> None:
    """The memory that checkpoints go into first (tier = "ram")."""


@command.command("create", cls=Command)
@_arena_option
@click.option(
    "--size",
    type=Size(),
    required=True,
    metavar="SIZE",
    help="All that it may hold; dumps keep to the key `arena_limit` of the plugin's configuration "
    "besides, which this does not raise.",
)
def create(arena: Path, size: int) -> None:
    """Mount a tmpfs for the arena: with huge pages, and without swap, where this kernel has them.

    It is gone with the next boot, or with `umount`.
    """
    options = create_arena(arena, size)
    output.answer(
        {"arena": arena, "options": options},
        lambda: output.say(f"{arena}: a tmpfs ({options})"),
    )


@command.command("list", cls=Command)
@_arena_option
def list_arena(arena: Path) -> None:
    """List what lies in the arena: checkpoints that are not drained (local), and durable ones that
    others there need. Unknown: the checkpoint is not at its image directory any more: find that
    before you discard anything (see `arena discard`).

    Exits 10 if it cannot be told of a directory there whose it is; that is listed with the reason.
    """
    found = contents_of(arena)
    entries: list[dict[str, Any]] = [
        {
            "checkpoint_id": one.owner.checkpoint_id,
            "directory": one.images,
            "state": tier_in(one),
            "arena_directory": one.directory,
            "taken": datetime.fromtimestamp(one.owner.time).astimezone(),
            "bytes": one.size,
        }
        for one in found.kept
    ]
    unreadable = [
        {"arena_directory": one.directory, "bytes": one.size, "problem": one.problem}
        for one in found.unread
    ]

    def show() -> None:
        rows = []
        for one, entry in zip(found.kept, entries, strict=True):
            taken = f"{entry['taken']:%Y-%m-%d %H:%M:%S}"
            state = entry["state"] or "unknown"
            rows.append((taken, one.directory.name, state, mib(one.size), one.images))
        output.table(("TAKEN", "ID", "STATE", "MEMORY", "DIRECTORY"), rows)
        for unread in found.unread:
            output.say(f"{unread.directory}: {mib(unread.size)}, unreadable: {unread.problem}")
        output.say(f"{mib(found.pool_bytes)} are kept for dumps to come")

    answer = {
        "arena": arena,
        "entries": entries,
        "unreadable": unreadable,
        "pool_bytes": found.pool_bytes,
    }
    output.answer(answer, show)
    if unreadable:
        count = plural(len(unreadable), "checkpoint")
        raise ImageError(f"{arena}: {count} cannot be read, and may not be drained yet")


@command.command("clean", cls=Command)
@_arena_option
@click.option(
    "--pool",
    "empties",
    is_flag=True,
    help="Give the host back what is kept of drained checkpoints for the next dumps to write into.",
)
def clean(arena: Path, empties: bool) -> None:
    """Take back the memory of what nobody needs: of dumps that were broken off, and of checkpoints
    whose drain was killed at its end.

    It goes into the pool, as far as the key `arena_pool` allows, with the value that was set when
    the checkpoint was dumped.
    """
    contents_of(arena)
    freed = recycle(arena)
    pool_bytes = empty_pool(arena) if empties else 0

    def show() -> None:
        output.say(f"{arena}: {len(freed)} directories freed")
        if empties:
            output.say(f"{mib(pool_bytes)} of the pool given back")

    output.answer({"arena": arena, "freed": freed, "freed_pool_bytes": pool_bytes}, show)


@command.command("discard", cls=Command)
@click.argument("images", metavar="IMAGES|ID", type=click.Path(path_type=Path))
@_arena_option
def discard(images: Path, arena: Path) -> None:
    """Give up the checkpoint in IMAGES, which is only in memory: it cannot be restored any more.

    Where IMAGES is gone, name its directory in the arena, or the ID that `gpustasis arena list`
    shows. If the list says unknown, IMAGES was renamed or removed, or is on a disk that is not
    mounted: look for it first (find / -xdev -name gpustasis-arena). If it was renamed, run
    `gpustasis drain` with the new name. Discard by ID only if it is gone for good: the memory is
    the only copy.
    """
    stored = discard_checkpoint(images, arena)
    output.answer(
        {"directory": images, "arena_directory": stored},
        lambda: output.say(f"{images}: given up"),
    )
