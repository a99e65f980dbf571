# SPDX-License-Identifier: Apache-2.0
"""Drain a checkpoint: bring its images from the arena into its image directory, compressed and
synced.

Killed at any moment, a drain leaves the checkpoint local, or durable: the manifest in the image
directory is written when everything else is on the disk, in one step, and the marker is removed
after that. What a killed drain has left is replaced by the next.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Container, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis import _core
from gpustasis._core import (
    ARENA_MARKER,
    ARENA_OWNER,
    MANIFEST_NAME,
    ArenaOwner,
    Manifest,
    drain_images,
    read_arena_owner,
    read_manifest,
    write_manifest,
)
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.draining.recycle import UNSYNCED, arena_of, recycle
from gpustasis.draining.syncing import opened_to_sync, require_synced, sync_name, sync_noted
from gpustasis.errors import CheckpointError, ImageError, LocalError
from gpustasis.files import sync_directory
from gpustasis.image.arena import (
    by_descriptor,
    find_marker,
    is_images_of,
    is_inventory_of,
    note_over,
    note_renamed,
    stored_directory,
)
from gpustasis.image.checkpoint import image_errors, parent_directory, require_not_sealed
from gpustasis.image.directory import is_there, shared, try_exclude

PATIENCE_S = 10.0  # waited for a dump that has just said that it is done
_POLL_S = 0.05

# Told the bytes of memory that were read, and how many there are, of one checkpoint; 0 and 0 while
# others are drained before it. What it raises stops the drain.
OnProgress = Callable[[int, int], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drained:
    """directory: of the checkpoint. images: how many were written; memory_bytes: that they hold;
    image_bytes: of their files; earlier: directories that were drained first, because the
    checkpoint is built on what is in them. All 0 for one that was durable already."""

    directory: Path
    checkpoint_id: bytes
    images: int
    memory_bytes: int
    image_bytes: int
    seconds: float
    earlier: tuple[Path, ...]


def drain(
    directory: Path,
    *,
    rate: int = 0,
    threads: int = 0,
    compress: bool = True,
    on_progress: OnProgress | None = None,
) -> Drained:
    """Drain the checkpoint in `directory`, and before it what it is built on and is local too.

    rate: bytes of images that are written in a second, at most; 0: no limit. threads: 0: one for
    each processor. Raises ImageError if the checkpoint is lost, damaged or not finished;
    CheckpointError if another drain, or its dump, is at work, or a file cannot be written: it is
    local then as before.
    """
    begin = time.monotonic()
    earlier = []
    parent = local_parent(directory)
    while parent is not None:
        earlier.append(parent)
        parent = local_parent(parent)
    goes_on = None if on_progress is None else lambda *_: on_progress(0, 0)
    for place in reversed(earlier):
        _drain_one(place, rate, threads, compress, goes_on)
    images, memory, size, checkpoint_id = _drain_one(
        directory, rate, threads, compress, on_progress
    )
    return Drained(
        directory=directory,
        checkpoint_id=checkpoint_id,
        images=images,
        memory_bytes=memory,
        image_bytes=size,
        seconds=time.monotonic() - begin,
        earlier=tuple(reversed(earlier)),
    )


def local_parent(directory: Path) -> Path | None:
    """The image directory of what the checkpoint in `directory` is built on, if that is to be
    drained before; None: there is no such one. Raises ImageError."""
    if not is_there(stored_directory(directory) / ARENA_OWNER):
        return None
    link = parent_directory(directory)
    if link is None or not is_there(link / ARENA_OWNER):
        return None
    parent = owner_of(link)
    return None if is_there(parent / MANIFEST_NAME) else parent


def can_be_drained(directory: Path) -> bool:
    """Whether the local checkpoint in `directory` may become durable: neither it nor what is to be
    drained before it was given up, is lost, or has a file that could not be synced."""
    at: Path | None = directory
    try:
        while at is not None:
            arena = stored_directory(at)
            if arena == at:  # it was drained meanwhile, or its marker is gone
                return is_there(at / MANIFEST_NAME)
            if is_there(arena / UNSYNCED):
                return False
            at = local_parent(at)
    except CheckpointError:
        return False
    return True


def owner_of(arena: Path) -> Path:
    """The image directory of a checkpoint in an arena, found to be the one of its dump. To drain it
    by a new name notes that, unless it is durable: then it is looked for beside its old name.
    Raises ImageError."""
    with image_errors():
        owner = read_arena_owner(arena)
    images = Path(owner.images)
    if is_images_of(images, owner):
        return images
    with suppress(OSError):
        for place in sorted(images.parent.iterdir()):
            if is_images_of(place, owner) and is_there(place / MANIFEST_NAME):
                _note_durable(arena, place)
                return place
    raise ImageError(
        f"{images} is not there, or another directory than the one that {arena} belongs to; if "
        "that was renamed, drain it first, by its new name; if it is durable already, give it its "
        "old name back"
    )


def _note_durable(arena: Path, images: Path) -> None:
    """So that its memory is given back when nothing is built on it any more. Who uses that now is
    left alone; nobody else writes to it meanwhile."""
    with suppress(OSError, ValueError, ImageError):
        lock = try_exclude(arena)
        if lock is not None:
            with lock:
                note_renamed(arena, images)


def _drain_one(
    directory: Path, rate: int, threads: int, compress: bool, on_progress: OnProgress | None
) -> tuple[int, int, int, bytes]:
    """Images, bytes of memory, bytes of files, and the id of the checkpoint."""
    # Marker and manifest have to be those of one directory: if others could put another in its
    # place in between, the marker of what was never drained might be removed.
    with ExitStack() as held:
        try:
            inside = held.enter_context(by_descriptor(directory))
        except OSError as exc:
            raise ImageError(f"cannot open {directory}: {exc.strerror}") from exc
        return _drain_opened(inside, rate, threads, compress, on_progress)


def _drain_opened(
    directory: Path, rate: int, threads: int, compress: bool, on_progress: OnProgress | None
) -> tuple[int, int, int, bytes]:
    require_not_sealed(directory)
    with locked(directory) as is_marked:
        if not is_marked:
            return (0, 0, 0, _durable(directory).checkpoint_id)
        # To the end: once it has a manifest it may be pruned, and nobody else knows of its memory.
        with shared((directory,)):
            marker = find_marker(directory)
            done = (0, 0, 0)
            if not is_there(directory / MANIFEST_NAME):
                if marker is None:  # it has no content: a dump syncs none
                    raise ImageError(
                        f"the checkpoint in {directory} was never drained, and it is lost with the "
                        f"last boot: {ARENA_MARKER} there is empty, as after a loss of power"
                    )
                done = _write(directory, rate, threads, compress, on_progress)
            # Else a drain was killed between its last steps.
            checkpoint_id = _durable(directory).checkpoint_id
            if marker is not None and marker.checkpoint_id != checkpoint_id:
                raise ImageError(
                    f"{directory}: {ARENA_MARKER} is of another checkpoint than the manifest"
                )
            with _writing(directory):
                if marker is not None:
                    note_over(directory, marker)
                (directory / ARENA_MARKER).unlink()
                sync_directory(directory)
    if marker is not None and (arena := arena_of(marker)) is not None:
        recycle(arena)
    return (*done, checkpoint_id)


def _durable(directory: Path) -> Manifest:
    if not is_there(directory / MANIFEST_NAME):
        raise ImageError(
            f"{directory}: neither a manifest nor {ARENA_MARKER}: there is nothing to drain"
        )
    with image_errors():
        return read_manifest(directory)


def _write(
    directory: Path, rate: int, threads: int, compress: bool, on_progress: OnProgress | None
) -> tuple[int, int, int]:
    arena = stored_directory(directory)
    owner = require_own(directory, arena)
    with shared((arena,)):
        manifest = finished_manifest(directory, arena)
        parent = _parent_of(directory, manifest)
        total = _memory_of(arena, manifest)
        tell = None if on_progress is None else lambda done: on_progress(done, total)
        with _writing(directory):
            if not _is_at(Path(owner.images), directory):
                note_renamed(arena, directory)
            drained = drain_images(
                arena,
                directory,
                parent,
                threads=threads,
                compress=compress,
                rate=rate,
                progress=tell,
            )
            names = [task.image_name for task in drained.tasks if task.externalized]
            sync_files(directory, arena, names)
            # When the checkpoint was made, and not when it was drained: rules of prune go by it.
            made = (arena / MANIFEST_NAME).lstat()
            write_manifest(directory, drained, ns=(made.st_atime_ns, made.st_mtime_ns))
    return len(names), total, sum((directory / name).stat().st_size for name in names)


def _is_at(path: Path, directory: Path) -> bool:
    """Another disk may be mounted there by now, and the directory be on one that is elsewhere."""
    with suppress(OSError):
        return path.samefile(directory)
    return False


def require_own(directory: Path, arena: Path) -> ArenaOwner:
    """Raise ImageError unless the images in `arena` are of the checkpoint in `directory`, and not
    of one that this is a copy of."""
    with image_errors():
        owner = read_arena_owner(arena)
    if not is_images_of(directory, owner):
        raise ImageError(
            f"{directory} is a copy of {owner.images}, whose images are in {arena}: drain that"
        )
    return owner


def finished_manifest(directory: Path, arena: Path) -> Manifest:
    """The manifest of the local checkpoint in `directory`, whose images are in `arena`, if criu has
    come to its end: what it writes last names this checkpoint. Raises ImageError, also if a drain
    could not sync one of its files."""
    if not is_there(arena / MANIFEST_NAME) or not is_there(directory / INVENTORY_NAME):
        raise ImageError(
            f"{directory}: the dump was broken off: there is no checkpoint that could be drained"
        )
    with image_errors():
        manifest = read_manifest(arena)
    if not is_inventory_of(directory, manifest):
        raise ImageError(
            f"{directory / INVENTORY_NAME} is not of the checkpoint whose images are in {arena}"
        )
    require_synced(directory, arena)
    return manifest


def _parent_of(directory: Path, manifest: Manifest) -> Path | None:
    """Where the images of the parent are on the disk; None: there is no parent."""
    if manifest.chain_length == 0:
        return None
    link = parent_directory(directory)
    if link is None:
        raise ImageError(f"{directory}: the link to its parent is missing")
    return owner_of(link) if is_there(link / ARENA_OWNER) else link


def _memory_of(arena: Path, manifest: Manifest) -> int:
    with image_errors():
        return sum(
            region.length
            for task in manifest.tasks
            if task.externalized
            for region in _core.ImageReader.open(arena / task.image_name).info.regions
        )


def sync_files(
    directory: Path, arena: Path, written: Container[str] = (), but: Container[str] = ()
) -> None:
    """What criu has written, it has not synced; nor the name of its directory. written: names of
    what the drain has written, as the next one does again. but: names of what is no part of the
    checkpoint. Raises OSError; ImageError if another file cannot be synced."""
    of_criu = []
    with os.scandir(directory) as items:
        for item in items:
            if item.name in but or not item.is_file(follow_symlinks=False):
                continue
            if item.name in written:
                with opened_to_sync(Path(item.path)) as fd:
                    os.fsync(fd)
            else:
                of_criu.append(item.name)
    sync_noted(directory, arena, of_criu)
    sync_directory(directory)
    sync_name(directory)


@contextmanager
def _writing(directory: Path) -> Iterator[None]:
    """What goes wrong in the block leaves the checkpoint as it was: in memory."""
    try:
        yield
    except NotImplementedError as exc:
        raise LocalError(f"{directory} is only in memory yet: {exc}") from exc
    except (OSError, ValueError) as exc:
        if isinstance(exc, _core.CorruptDataError):
            raise ImageError(str(exc)) from exc
        raise LocalError(f"{directory} is only in memory yet, it was not drained: {exc}") from exc


@contextmanager
def locked(directory: Path) -> Iterator[bool]:
    """Hold the lock of the marker: no other drain, and no dump, is at work there. False: there is
    no marker. Raises CheckpointError."""
    path = directory / ARENA_MARKER
    end = time.monotonic() + PATIENCE_S
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            yield False
            return
        except OSError as exc:
            raise ImageError(f"cannot open {path}: {exc.strerror}") from exc
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as exc:
            os.close(fd)
            if not isinstance(exc, BlockingIOError):
                raise ImageError(f"cannot lock {path}: {exc.strerror}") from exc
            if time.monotonic() >= end:
                raise CheckpointError(
                    f"{path} is locked: a drain or a seal is at work, or the dump has not ended"
                ) from None
            time.sleep(_POLL_S)
            continue
        try:
            if os.fstat(fd).st_nlink != 0:
                yield True
                return
        finally:
            os.close(fd)
