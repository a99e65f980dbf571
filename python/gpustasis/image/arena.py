# SPDX-License-Identifier: Apache-2.0
"""Checkpoints that lie in memory until they are drained: where their files are, and what cannot be
done with them before. docs/format.md, "In memory first"; the core decides where files are
(src/core/arena.hpp)."""

from __future__ import annotations

import errno
import fcntl
import os
import re
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from enum import StrEnum
from pathlib import Path

from gpustasis import _core
from gpustasis._core import ARENA_MARKER, ARENA_OWNER, ArenaMarker, ArenaOwner, Manifest
from gpustasis.criu.images import inventory_plugins
from gpustasis.errors import CheckpointError, ImageError, LocalError, UnsupportedError
from gpustasis.files import open_new
from gpustasis.image.directory import PATIENCE_S, is_there, share, try_exclude

_POLL_S = 0.05
OVER = _core.ARENA_OVER  # drained or given up: its image directory may hold another one by now


class Tier(StrEnum):
    """local: images and manifest are in the memory of this host alone. durable: all is in the image
    directory."""

    LOCAL = "local"
    DURABLE = "durable"


def stored_directory(directory: Path) -> Path:
    """Where the manifest and our images of the checkpoint in `directory` are: there, or in an
    arena. Raises ImageError if that is gone, and the checkpoint lost with it, or is no arena."""
    if not is_there(directory / ARENA_MARKER):
        return directory
    try:
        return _core.stored_directory(directory)
    except NotImplementedError as exc:
        raise UnsupportedError(str(exc)) from exc
    except (OSError, ValueError) as exc:
        raise ImageError(str(exc)) from exc


def find_marker(directory: Path) -> ArenaMarker | None:
    """The marker in an image directory, also of a checkpoint that is durable by now; None: there is
    none. Raises ImageError."""
    try:
        return _core.find_arena_marker(directory)
    except NotImplementedError as exc:
        raise UnsupportedError(str(exc)) from exc
    except (OSError, ValueError) as exc:
        raise ImageError(str(exc)) from exc


@contextmanager
def own_marker(images: Path, checkpoint_id: bytes) -> Iterator[Path | None]:
    """The marker in an image directory, locked: no dump and no drain is at work there. None: there
    is none, or it is another checkpoint's by now. Raises BlockingIOError if somebody else holds the
    lock, or has put another marker in its place; OSError, and as find_marker."""
    path = images / ARENA_MARKER
    marker = find_marker(images)
    if marker is None or marker.checkpoint_id != checkpoint_id:
        yield None
        return
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        yield None
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # Somebody may have removed or replaced it before we had the lock: the name is that of
        # another checkpoint's marker then.
        if not _is_at(path, fd):
            raise BlockingIOError(errno.EAGAIN, "was replaced a moment ago", str(path))
        marker = find_marker(images)
        yield path if marker is not None and marker.checkpoint_id == checkpoint_id else None
    finally:
        os.close(fd)


def _is_at(path: Path, fd: int) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.lstat())
    except FileNotFoundError:
        return False


@contextmanager
def by_descriptor(directory: Path) -> Iterator[Path]:
    """The directory, by a path that leads through a descriptor: whoever may write beside it cannot
    put another in its place. Errors out of the block name it as it was given. Raises OSError."""
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    inside = f"/proc/self/fd/{fd}"

    def as_given(text: str) -> str:
        return re.sub(rf"{inside}\b", lambda _: str(directory), text)

    try:
        yield Path(inside)
    except CheckpointError as exc:
        exc.args = (as_given(str(exc)),)
        raise
    except OSError as exc:
        if isinstance(exc.filename, str):
            exc.filename = as_given(exc.filename)
        raise
    finally:
        os.close(fd)


@contextmanager
def images_of(owner: ArenaOwner) -> Iterator[Path | None]:
    """The image directory that the dump of `owner` was made into, as by_descriptor. None: another
    has its name, or none, or it cannot be opened."""
    with ExitStack() as held:
        images = None
        with suppress(OSError):
            images = held.enter_context(by_descriptor(Path(owner.images)))
        yield images if images is not None and is_images_of(images, owner) else None


def is_images_of(images: Path, owner: ArenaOwner) -> bool:
    """Whether the directory `images` is the one that the dump of `owner` was made into, whatever
    its name is now. What cannot be looked at is not."""
    try:
        found = images.stat()
    except OSError:
        return False
    # Some file systems, as of a network, have another device number each time they are mounted.
    return found.st_ino == owner.inode and (
        found.st_dev == owner.device or os.path.realpath(images) == owner.images
    )


def is_inventory_of(images: Path, manifest: Manifest) -> bool:
    """Whether CRIU's inventory in `images` is of the checkpoint of that manifest: it names it, if
    there are images of ours (src/cuda_plugin/inventory_names.hpp). Raises ImageError."""
    is_ours = any(task.externalized for task in manifest.tasks)
    return not is_ours or f"checkpoint-{manifest.checkpoint_id.hex()}" in inventory_plugins(images)


@contextmanager
def opened_arena(arena: Path) -> Iterator[Path]:
    """The arena, or a directory in it, by a path that leads through a descriptor: whoever may write
    beside it cannot put another in its place. Raises OSError, ValueError if it is no such one."""
    fd = os.open(arena, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        inside = Path(f"/proc/self/fd/{fd}")
        try:
            _core.require_arena(inside)
        except ValueError as exc:
            raise ValueError(str(exc).replace(str(inside), str(arena))) from exc
        yield inside
    finally:
        os.close(fd)


@contextmanager
def arena_alone(arena: Path) -> Iterator[None]:
    """Hold the arena's lock: no dump looks for room there meanwhile, or builds on what is in it.
    Raises CheckpointError if it stays locked; ImageError."""
    end = time.monotonic() + PATIENCE_S
    while (turn := try_exclude(arena)) is None:
        if time.monotonic() >= end:
            raise CheckpointError(f"{arena} has been locked for {PATIENCE_S:g} s by a dump")
        time.sleep(_POLL_S)
    with turn:
        yield


@contextmanager
def marked_directory(marker: ArenaMarker) -> Iterator[Path]:
    """The directory in an arena that a marker names, as opened_arena. Raises ImageError if it is of
    another checkpoint; OSError, ValueError, NotImplementedError."""
    with opened_arena(Path(marker.directory)) as inside:
        owner = _core.read_arena_owner(inside)
        if (owner.checkpoint_id, owner.boot_id) != (marker.checkpoint_id, marker.boot_id):
            raise ImageError(f"{marker.directory} is of another checkpoint")
        yield inside


def note_over(images: Path, marker: ArenaMarker) -> bool:
    """Write down in that directory that its checkpoint is drained or given up: somebody may read
    it, or need it, when it could be recycled. Without the note it stays as long as the image
    directory does not say so itself.

    images: where the marker is, or was. A copy of an image directory has the marker too, and so may
    anything that others made: only the directory of the dump itself says that its checkpoint is
    over. False: it was not written down."""
    with (
        suppress(OSError, ValueError, NotImplementedError, CheckpointError),
        marked_directory(marker) as inside,
    ):
        if is_images_of(images, _core.read_arena_owner(inside)):
            with share(inside):  # who has it alone could not remove it with a new file in it
                (inside / OVER).touch(mode=0o600)
            return True
    return False


def note_renamed(directory: Path, images: Path) -> None:
    """Have the owner in `directory`, one of an arena, name its image directory by the path that it
    has now. The caller holds the lock of the marker. Raises OSError; ValueError if there is an end
    of line in the path."""
    new = os.fsencode(os.path.realpath(images))
    if b"\n" in new:
        raise ValueError(f"an arena can belong to no directory of this path: {images}")
    owner = directory / ARENA_OWNER
    lines = owner.read_bytes().splitlines(keepends=True)
    part = directory / f".{ARENA_OWNER}.part"
    part.unlink(missing_ok=True)
    with open_new(part) as file:
        file.writelines([*lines[:-1], b"images " + new + b"\n"])
    part.rename(owner)


def tier_of(directory: Path) -> Tier:
    """Of the checkpoint in `directory`. Raises as stored_directory."""
    return Tier.LOCAL if is_there(stored_directory(directory) / ARENA_OWNER) else Tier.DURABLE


def tier_at(path: Path) -> Tier:
    """The same of a directory or an archive, which is always durable."""
    return tier_of(path) if path.is_dir() else Tier.DURABLE


def require_durable(directory: Path, action: str) -> None:
    """Raise LocalError if the checkpoint there is not drained. action: what cannot be done."""
    if tier_of(directory) == Tier.LOCAL:
        raise LocalError(
            f"{directory}: cannot {action}: its images are only in memory yet; drain it first: "
            f"`gpustasis drain {directory}`"
        )
