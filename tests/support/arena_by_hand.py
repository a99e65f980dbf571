# SPDX-License-Identifier: Apache-2.0
"""Arenas with checkpoints in them, written from docs/format.md, "In memory first": to test what
becomes of their memory no dump is needed."""

from __future__ import annotations

import fcntl
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from gpustasis._core import (
    ARENA_MARKER,
    ARENA_OWNER,
    MANIFEST_NAME,
    PARENT_LINK,
    Manifest,
    ManifestTask,
    write_manifest,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.task import read_task
from support.image_samples import CHECKPOINT_ID, make_checkpoint, mixture
from support.inventory import write_inventory

BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
RECORDS = Path("/run/gpustasis")
LIMIT = 1 << 30


def write_owner(directory: Path, checkpoint_id: bytes, images: Path, version: int = 1) -> None:
    """As a dump into `images`, which is there, does."""
    found = images.stat()
    path = directory / ARENA_OWNER
    path.write_text(
        f"gpustasis-arena-owner {version}\ncheckpoint {checkpoint_id.hex()}\nboot {BOOT}\ntime 1\n"
        f"device {found.st_dev}\ninode {found.st_ino}\nlimit {LIMIT}\npool 0\nimages {images}\n"
    )
    path.chmod(0o600)


def write_marker(images: Path, checkpoint_id: bytes, directory: Path) -> None:
    """Under its name in one step, in place of one that is there."""
    part = images / f".{ARENA_MARKER}.part"
    arena = directory.parent.stat()
    part.write_text(
        f"gpustasis-arena 1\ncheckpoint {checkpoint_id.hex()}\nboot {BOOT}\ndirectory {directory}\n"
        f"device {arena.st_dev}\ninode {arena.st_ino}\n"
    )
    part.rename(images / ARENA_MARKER)


@dataclass(frozen=True)
class Local:
    """A checkpoint in an arena. images: its image directory; stored: its directory in the arena."""

    checkpoint_id: bytes
    images: Path
    stored: Path

    def drain(self) -> None:
        """What a drain leaves, but for the images."""
        write_manifest(self.images, manifest_of(self.checkpoint_id))
        (self.images / ARENA_MARKER).unlink()

    def break_off(self) -> None:
        """As if criu had been killed before it wrote its inventory."""
        (self.images / INVENTORY_NAME).unlink()


def manifest_of(checkpoint_id: bytes) -> Manifest:
    """Of one image."""
    task = ManifestTask(pid=7, externalized=True, digest=bytes(16))
    return Manifest(checkpoint_id=checkpoint_id, tasks=[task])


def make_local(arena: Path, images: Path, number: int, parent: Local | None = None) -> Local:
    """One whose dump has come to its end. Its name in the arena is `number` in hex, the lowest
    first. `images` is made."""
    checkpoint_id = number.to_bytes(16)
    images.mkdir(mode=0o700)
    stored = arena / checkpoint_id.hex()
    stored.mkdir(mode=0o700)
    write_owner(stored, checkpoint_id, images)
    (stored / "gpustasis-7.img").write_bytes(bytes(1 << 14))
    if parent is not None:
        (stored / PARENT_LINK).symlink_to(Path("..") / parent.stored.name)
    write_manifest(stored, manifest_of(checkpoint_id))
    write_marker(images, checkpoint_id, stored)
    write_inventory(images, f"checkpoint-{checkpoint_id.hex()}")
    assert (stored / MANIFEST_NAME).exists()
    return Local(checkpoint_id, images, stored)


def make_drainable(arena: Path, images: Path) -> Path:
    """A local checkpoint with an image that can be read; its directory in the arena."""
    images.mkdir(mode=0o700)
    stored = arena / CHECKPOINT_ID.hex()
    stored.mkdir(mode=0o700)
    write_owner(stored, CHECKPOINT_ID, images)
    make_checkpoint(stored, {7: mixture()})
    write_marker(images, CHECKPOINT_ID, stored)
    write_inventory(images, f"checkpoint-{CHECKPOINT_ID.hex()}")
    return stored


@contextmanager
def dropped(pid: int, local: Local, path: Path, kind: str = "dropped") -> Iterator[None]:
    """A record, as src/dropped_memory/drop_record.cpp writes it, that memory of process `pid` is in
    what `local` stores, which the dump has seen at `path`. kind: "checkpointed": GPU memory, which
    the driver has handed over."""
    task = read_task(pid)
    namespace = os.stat(f"/proc/{pid}/ns/pid").st_ino
    found = local.stored.stat()
    records = RECORDS / kind
    records.mkdir(mode=0o700, parents=True, exist_ok=True)
    record = records / f"{namespace}-{pid}-{task.start_time}"
    part = records / f".{record.name}.part"  # others list what is there meanwhile
    part.write_text(
        f"gpustasis drop record 1\n{namespace} {pid} {task.start_time}\n{pid} {namespace} 0 0 "
        f"{int(kind == 'checkpointed')}\n"
        f"{BOOT.replace('-', '')}\n{local.checkpoint_id.hex()}\n{'0' * 32}\ngpustasis-7.img\n"
        f"{found.st_dev} {found.st_ino}\n{path}"
    )
    part.chmod(0o600)
    part.rename(record)
    try:
        yield
    finally:
        record.unlink(missing_ok=True)


@contextmanager
def before_it_is(call: str, act: Callable[[], None]) -> Iterator[None]:
    """Have `act` done when a marker is about to be opened ("open"), or to be locked ("flock")."""
    module = os if call == "open" else fcntl
    really, left = getattr(module, call), [act]

    def first_act(what: Any, *more: Any) -> Any:
        name = os.readlink(f"/proc/self/fd/{what}") if call == "flock" else str(what)
        if left and name.endswith(ARENA_MARKER):
            left.pop()()
        return really(what, *more)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, call, first_act)
        yield
    assert not left


@contextmanager
def once(where: str, name: str, act: Callable[[], None], *, after: bool = False) -> Iterator[None]:
    """Have `act` done right before, or after, the first call of `name` of module `where`."""
    module, left = sys.modules[where], [act]
    really = getattr(module, name)

    def call(*arguments: Any, **named: Any) -> Any:
        if left and not after:
            left.pop()()
        found = really(*arguments, **named)
        if left:
            left.pop()()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, call)
        yield
    assert not left


def exchange(one: Path, other: Path) -> None:
    """The names of two directories, as whoever may write beside them can."""
    aside = one.with_name("aside")
    one.rename(aside)
    other.rename(one)
    aside.rename(other)


@contextmanager
def meanwhile(act: Callable[[], None]) -> Iterator[None]:
    """Have `act` done when the first directory of an arena has been emptied."""
    rmdir, left = Path.rmdir, [act]

    def then_act(path: Path) -> None:
        rmdir(path)
        if left:
            left.pop()()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "rmdir", then_act)
        yield
    assert not left


def names(arena: Path) -> list[str]:
    """Of all that is in an arena but its pool."""
    return sorted(path.name for path in arena.iterdir() if path.name != "pool")


@contextmanager
def locked(path: Path, how: int) -> Iterator[None]:
    """As somebody else holds it. how: of flock(2)."""
    fd = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(fd, how)
        yield
    finally:
        os.close(fd)
