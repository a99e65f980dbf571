# SPDX-License-Identifier: Apache-2.0
"""What becomes of the memory of checkpoints that nobody needs in an arena any more: their files go
into its pool, for the next dump to write into, or are removed.

A directory of an arena is needed as long as its checkpoint is local, another that is local is built
on it, somebody reads it (a lock), or a record says that a dump which was broken off has left memory
of a process in it. What cannot be told counts as needed. All of that may change while other
directories are emptied: it counts as it is found under an exclusive lock on the directory.
"""

from __future__ import annotations

import errno
import logging
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
    ARENA_OWNER,
    MANIFEST_NAME,
    PARENT_LINK,
    ArenaMarker,
    ArenaOwner,
    list_checkpoint_records,
    list_drop_records,
    read_arena_owner,
)
from gpustasis.draining.over import is_over
from gpustasis.errors import CheckpointError, ImageError, UnsupportedError
from gpustasis.image.arena import (
    OVER,
    arena_alone,
    images_of,
    is_images_of,
    marked_directory,
    opened_arena,
    own_marker,
)
from gpustasis.image.directory import is_there, try_exclude

log = logging.getLogger(__name__)

POOL = "pool"  # src/cuda_plugin/arena_dump.hpp
RESERVED = "reserved"  # src/cuda_plugin/arena_room.hpp
SYNCING = ".syncing"  # of a drain: it syncs files of criu, or was killed while it did
UNSYNCED = ".unsynced"  # of a drain: names a file of criu that may not be on the disk
# What is written in the directory of a checkpoint: its name, and that of what is not complete yet.
_FILE = rf"gpustasis-.+\.img|{PARENT_LINK}|{ARENA_OWNER}|{RESERVED}|\.(syncing|unsynced|over)"
_OF_DUMP = re.compile(rf"({_FILE})|\.({_FILE})\.part|\.\.({_FILE})\.part\.part")
_ID = re.compile(r"[0-9a-f]{32}")
# A dump writes the owner a moment after it has made the directory: one that is older is nobody's.
_MAKING_S = 300.0
_ERRORS = (OSError, ValueError, NotImplementedError, CheckpointError)
_NO_CHECKPOINT = (None, errno.ENOENT, errno.ENOTDIR, errno.ELOOP)  # None: it has no owner


@dataclass(frozen=True, slots=True)
class Kept:
    """A checkpoint in an arena. size: bytes of memory that its files take."""

    directory: Path
    owner: ArenaOwner
    size: int

    @property
    def images(self) -> Path:
        """Its image directory, as its dump saw it, or as a drain has found it renamed."""
        return Path(self.owner.images)


@dataclass(frozen=True, slots=True)
class Unread:
    """A directory of an arena of which it cannot be told whose it is. It may hold a checkpoint, or
    a dump may be at work there, so nobody may leave it out. problem: why."""

    directory: Path
    size: int
    problem: str


@dataclass(frozen=True, slots=True)
class Found:
    """What lies in an arena: every checkpoint, and what cannot be read. What is being made, or
    removed, may be missing."""

    kept: list[Kept]
    unread: list[Unread]


def look_into(arena: Path) -> Found:
    """All of which files are in the arena. Raises OSError if the arena cannot be read."""
    found = Found([], [])
    for name in _names_in(arena):
        path, size = arena / name, 0
        try:
            size = size_of(path)
            owner = _owner_in(path)
            if owner is not None:
                found.kept.append(Kept(path, owner, size))
        except FileNotFoundError:
            continue
        except _ERRORS as exc:
            found.unread.append(Unread(path, size, str(exc)))
    return found


def _owner_in(directory: Path) -> ArenaOwner | None:
    """None: it is being made, or removed. Raises as _ERRORS."""
    if _comes_or_goes(directory):
        return None
    try:
        return read_arena_owner(directory)
    except _ERRORS:
        if _comes_or_goes(directory):  # its owner went between both
            return None
        raise


def _comes_or_goes(directory: Path) -> bool:
    """Whether there is no owner because its dump is about to write it, or because somebody is
    removing all. Raises OSError, FileNotFoundError if the directory is gone; ImageError."""
    age = time.time() - directory.stat().st_mtime
    return not is_there(directory / ARENA_OWNER) and age < _MAKING_S


def is_name(name: str) -> bool:
    """Whether a directory of an arena can have this name."""
    return _ID.fullmatch(name) is not None


def _names_in(arena: Path) -> list[str]:
    """Of all directories of checkpoints, whatever is in them. A link is none."""
    with os.scandir(arena) as items:
        return sorted(
            item.name for item in items if is_name(item.name) and item.is_dir(follow_symlinks=False)
        )


def size_of(directory: Path) -> int:
    """Bytes of memory that the files of a directory take."""
    total = 0
    with suppress(FileNotFoundError), os.scandir(directory) as items:
        for item in items:
            with suppress(FileNotFoundError):
                total += item.stat(follow_symlinks=False).st_blocks * 512
    return total


def recycle(arena: Path) -> list[Path]:
    """Take the memory of all checkpoints back that are not needed in the arena any more; their
    directories there. Nothing is raised: who drains has done so, and the next one tries again. Nor
    is anything touched if `arena` is no arena, or what no dump has made."""
    freed: list[Path] = []
    failed: set[str] = set()
    try:
        with opened_arena(arena) as inside:
            while names := _recycle_once(inside, arena, failed):
                freed += [arena / name for name in names]
    except _ERRORS as exc:
        log.warning("memory of drained checkpoints in %s was not given back: %s", arena, exc)
    return freed


def arena_of(marker: ArenaMarker) -> Path | None:
    """The arena of the directory that a marker names, to be recycled. Anybody can have written the
    marker: None if its checkpoint is not there, as stored_directory() wants it."""
    try:
        with marked_directory(marker) as inside:
            return inside.resolve().parent
    except FileNotFoundError:
        return None  # somebody was faster
    except _ERRORS as exc:
        log.warning("memory of a checkpoint in %s was not given back: %s", marker.directory, exc)
        return None


@contextmanager
def without_child(images: Path, marker: ArenaMarker) -> Iterator[None]:
    """While no other checkpoint is built on what `marker`, which was found in `images`, names: that
    one could not be drained any more. Raises CheckpointError if one is, or if that cannot be told.
    Nothing needs a copy of an image directory, nor what leads to no checkpoint: anybody can have
    written the marker."""
    with ExitStack() as held:
        try:
            inside = _inside_own(images, marker, held)
            if inside is not None:
                arena = inside.resolve().parent
                held.enter_context(arena_alone(arena))
                here = inside.stat()
                needs = _children(arena, alive=True)
                why = needs.get((here.st_dev, here.st_ino)) or needs.get(inside.resolve().name)
                if why:
                    raise CheckpointError(f"{marker.directory} cannot be given up: {why}")
        except (OSError, NotImplementedError, ImageError) as exc:
            raise CheckpointError(
                f"whether another checkpoint is built on what is in {marker.directory} cannot be "
                f"told: {exc}"
            ) from exc
        yield


def _inside_own(images: Path, marker: ArenaMarker, held: ExitStack) -> Path | None:
    """What the marker leads to, open for as long as `held` is; None: it is no checkpoint, or it is
    not that of `images`. One whose owner is damaged, or gone, may be: what is built on it needs it
    all the same. Raises OSError, NotImplementedError if it may be one."""
    inside: Path | None = None
    try:
        inside = held.enter_context(opened_arena(Path(marker.directory)))
        owner = read_arena_owner(inside)
    except ValueError:
        return inside
    except OSError as exc:
        if exc.errno in _NO_CHECKPOINT:
            return inside
        raise
    is_marked = (owner.checkpoint_id, owner.boot_id) == (marker.checkpoint_id, marker.boot_id)
    return inside if is_marked and is_images_of(images, owner) else None


def give_up(directory: Path) -> None:
    """Remove the checkpoint in `directory`, which is one of an arena, and its marker, if its image
    directory is where it was. Raises ImageError if it is no such directory; CheckpointError if
    another checkpoint or a process needs it, or somebody is at work there."""
    try:
        with opened_arena(directory.parent) as inside:
            _give_up(inside, directory)
    except NotImplementedError as exc:
        raise UnsupportedError(str(exc)) from exc
    except (OSError, ValueError) as exc:
        raise ImageError(f"cannot give up {directory}: {exc}") from exc


def _give_up(inside: Path, directory: Path) -> None:
    if directory.name not in _names_in(inside):
        raise ImageError(f"{directory} is no directory of a checkpoint in an arena")
    place = inside / directory.name
    lock = try_exclude(place)
    if lock is None:
        raise CheckpointError(f"{directory} is locked: its dump, a drain or a reader is at work")
    with lock:
        if why := _why_needed(place, _needs(inside)):
            raise CheckpointError(f"{directory} cannot be given up: {why}")
        owner = read_arena_owner(place)
        try:
            with images_of(owner) as images:
                if images is not None:
                    with own_marker(images, owner.checkpoint_id) as marker:
                        if marker is not None:
                            marker.unlink()
        except BlockingIOError as exc:
            text = f"{owner.images} is locked: a dump or a drain is at work"
            raise CheckpointError(text) from exc
        _empty(inside, place, owner, size_of(place))


def _recycle_once(inside: Path, arena: Path, failed: set[str]) -> list[str]:
    """Names of the directories that were removed. failed: names to leave alone; those in which
    something goes wrong are added."""
    names = _names_in(inside)
    needs = _needs(inside)
    largest = max((size_of(inside / name) for name in names), default=0)
    freed = []
    for name in names:
        if name in failed:
            continue
        try:
            if _try_free(inside, inside / name, needs, largest):
                freed.append(name)
        except _ERRORS as exc:
            failed.add(name)
            if os.path.lexists(inside / name):  # else another was faster
                text = str(exc).replace(str(inside), str(arena))
                log.warning("memory of %s was not given back: %s", arena / name, text)
    return freed


def _try_free(inside: Path, directory: Path, needs: Needs, largest: int) -> bool:
    """Whether it was removed. needs: as they were a while ago."""
    reserved = directory / RESERVED
    if _why_needed(directory, needs) and not is_there(reserved):
        return False
    if _comes_or_goes(directory):
        return False
    lock = try_exclude(directory)
    if lock is None:
        return False
    with lock:
        if not is_there(directory / ARENA_OWNER):
            _require_of_dump(directory)
        reserved.unlink(missing_ok=True)  # no dump is under way here
        if _why_needed(directory, _needs(inside)):
            return False
        owner = read_arena_owner(directory) if is_there(directory / ARENA_OWNER) else None
        if owner is not None and not is_over(directory, owner):
            return False
        if owner is None and not os.listdir(directory):
            directory.rmdir()  # which needs no pool
        else:
            _empty(inside, directory, owner, largest)
    return True


def _require_of_dump(directory: Path) -> None:
    """Raise ImageError if there is anything that no dump makes: without an owner, names alone say
    what a directory is."""
    for name in sorted(os.listdir(directory)):
        if not _OF_DUMP.fullmatch(name):
            raise ImageError(f"it has no {ARENA_OWNER}, and holds {name!r}, which no dump makes")


# Why a directory is needed, by its device and inode; by its name where a link does not lead there
# from here, as in another mount namespace.
Needs = dict[tuple[int, int] | str, str]


def _needs(inside: Path) -> Needs:
    """What is built on what, and what memory may have to be put back from. Links count whoever owns
    the directories that they are in: a later version of this program may. Raises as _ERRORS if
    that cannot be told."""
    found: Needs = {}
    for record in (*list_drop_records(), *list_checkpoint_records()):
        why = f"it holds memory of process {record.pid}, whose dump was broken off"
        found[record.device, record.inode] = why
    return found | _children(inside)


def _children(inside: Path, *, alive: bool = False) -> Needs:
    """The same, of what is built on what alone. alive: not of those that are given up, or drained.
    Raises OSError."""
    found: Needs = {}
    for name in _names_in(inside):
        if alive and is_there(inside / name / OVER):
            continue
        link = inside / name / PARENT_LINK
        try:
            text = os.readlink(link)
        except OSError as exc:
            if exc.errno in (errno.ENOENT, errno.EINVAL):  # EINVAL: it is no link
                continue
            raise
        why = f"checkpoint {name} is built on it"
        if text.startswith("/"):  # out of the arena, to a disk that may not answer
            found[Path(text).name] = why
            continue
        try:
            leads_to = link.stat()
        except OSError:
            found[Path(text).name] = why
        else:
            found[leads_to.st_dev, leads_to.st_ino] = why
    return found


def _why_needed(directory: Path, needs: Needs) -> str | None:
    here = directory.stat()
    return needs.get((here.st_dev, here.st_ino)) or needs.get(directory.name)


def _empty(inside: Path, directory: Path, owner: ArenaOwner | None, largest: int) -> None:
    """The files that are largest go into the pool, as long as it holds no more than the plugin's
    configuration says: by itself, than `largest`, the largest checkpoint in the arena, and half of
    what that may hold. The owner is the last to go: without it nobody knows what is left. What has
    none is removed."""
    pool = _open_pool(inside)
    try:
        room = 0
        if owner is not None:
            limit = owner.pool or min(largest, owner.limit // 2)
            room = limit - size_of(Path(f"/proc/self/fd/{pool}"))
        for name in (MANIFEST_NAME, SYNCING, UNSYNCED, OVER):
            (directory / name).unlink(missing_ok=True)
        files = sorted(
            ((path.lstat(), path) for path in directory.iterdir() if path.name != ARENA_OWNER),
            key=lambda one: one[0].st_size,
            reverse=True,
        )
        for status, path in files:
            size = status.st_blocks * 512
            if stat.S_ISREG(status.st_mode) and 0 < size <= room:
                name = f"{directory.name}-{path.name.removeprefix('gpustasis-')}"
                os.rename(path, name, dst_dir_fd=pool)
                room -= size
            else:
                path.unlink()
    finally:
        os.close(pool)
    (directory / ARENA_OWNER).unlink(missing_ok=True)
    directory.rmdir()


def _open_pool(inside: Path) -> int:
    pool = inside / POOL
    pool.mkdir(mode=0o700, exist_ok=True)
    return os.open(pool, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
