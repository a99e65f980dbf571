# SPDX-License-Identifier: Apache-2.0
"""Checkpoints in memory, made without a dump: as docs/format.md, "In memory first", says."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpustasis._core import ARENA_MARKER, ARENA_OWNER, PARENT_LINK, link_parent
from gpustasis.criu.images import INVENTORY_NAME
from support.chains import make_link, memory_of
from support.inventory import write_inventory

LIMIT = 1 << 30  # bytes that the arena may hold
RESERVED = "reserved"


def make_local(
    images: Path,
    arena: Path,
    words: tuple[str, ...] = ("A", "b", "0"),
    parent: Path | None = None,
) -> Path:
    """Have the checkpoint in `images`, which is not there yet, lie in `arena`; its directory there.
    words: its pages, as of memory_of. parent: the directory with the images of what it is built
    on."""
    arena.mkdir(mode=0o700, parents=True, exist_ok=True)
    manifest = make_link(images, {7: memory_of(list(words))}, parent=parent, finished=False)
    name = manifest.checkpoint_id.hex()
    stored = arena / name
    stored.mkdir(mode=0o700)
    if parent is not None:
        (images / PARENT_LINK).unlink()
        link_parent(stored, parent)
    for path in images.iterdir():
        (stored / path.name).write_bytes(path.read_bytes())
        path.unlink()
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    found, kept = images.stat(), arena.stat()
    write_text(
        stored / ARENA_OWNER,
        f"gpustasis-arena-owner 1\ncheckpoint {name}\nboot {boot}\ntime 1800000000\n"
        f"device {found.st_dev}\ninode {found.st_ino}\nlimit {LIMIT}\npool 0\nimages {images}\n",
    )
    write_text(
        images / ARENA_MARKER,
        f"gpustasis-arena 1\ncheckpoint {name}\nboot {boot}\ndirectory {stored}\n"
        f"device {kept.st_dev}\ninode {kept.st_ino}\n",
    )
    write_inventory(images, f"checkpoint-{name}")
    return stored


def write_text(path: Path, text: str) -> None:
    path.write_text(text)
    path.chmod(0o600)


@contextmanager
def under_way(images: Path, stored: Path) -> Iterator[None]:
    """In the block criu is still at work: room is reserved, marker and directory are locked. The
    inventory is removed, and whoever likes writes it. Afterwards criu has died."""
    (images / INVENTORY_NAME).unlink()
    (stored / RESERVED).touch(mode=0o600)
    marker = os.open(images / ARENA_MARKER, os.O_RDWR | os.O_CLOEXEC)
    directory = os.open(stored, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(marker, fcntl.LOCK_EX | fcntl.LOCK_NB)
        fcntl.flock(directory, fcntl.LOCK_SH | fcntl.LOCK_NB)
        yield
    finally:
        os.close(directory)
        os.close(marker)


def finish(images: Path, stored: Path) -> None:
    """What criu, and the plugin behind it, do last of a dump that succeeds."""
    write_inventory(images, f"checkpoint-{stored.name}")
    (stored / RESERVED).unlink()
