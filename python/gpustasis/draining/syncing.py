# SPDX-License-Identifier: Apache-2.0
"""CRIU's files are brought to the disk. Linux tells of a write that has failed once: the next fsync
of the file succeeds, whatever is on the disk. So it is noted in the arena before the first fsync
that files are being synced, and that one has failed.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpustasis.draining.recycle import SYNCING, UNSYNCED
from gpustasis.errors import ImageError
from gpustasis.files import open_new, sync_directory
from gpustasis.image.checkpoint import image_errors
from gpustasis.image.directory import is_there


@contextmanager
def opened_to_sync(path: Path) -> Iterator[int]:
    """Raises OSError; it may have become a link, or a FIFO, which is not waited for."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        yield fd
    finally:
        os.close(fd)


def make_durable(directory: Path) -> None:
    """Sync all files of a checkpoint that has none in an arena, and their names: criu syncs
    nothing. Raises OSError."""
    try:
        with os.scandir(directory) as items:
            for item in items:
                if not item.is_file(follow_symlinks=False):
                    continue
                with suppress(FileNotFoundError), opened_to_sync(Path(item.path)) as fd:
                    os.fsync(fd)  # the end of a drain removes its marker
    except PermissionError:  # who may not read a file can have it synced with all others
        with _opened(directory) as fd:
            _sync_file_system(fd)
    sync_directory(directory)
    sync_name(directory)


def require_on_disk(directory: Path) -> None:
    """As make_durable. Raises ImageError."""
    try:
        make_durable(directory)
    except OSError as exc:
        raise ImageError(
            f"{directory} could not be synced: it may not be what was dumped, whatever a later "
            f"sync says: {exc}"
        ) from exc


def sync_name(directory: Path) -> None:
    """Whoever started criu may have made the directory a moment ago. Raises OSError."""
    try:
        sync_directory(directory / "..")
    except PermissionError:
        os.sync()  # who may not read the directory above it cannot have that synced alone


def require_synced(directory: Path, arena: Path) -> None:
    """Raise ImageError if it is noted in `arena` that a file in `directory` could not be synced."""
    if is_there(arena / UNSYNCED):
        with image_errors():
            raise _unsynced(directory / os.fsdecode((arena / UNSYNCED).read_bytes()))


def sync_noted(directory: Path, arena: Path, names: Iterable[str]) -> None:
    """Sync these files of criu. The caller holds the lock of the marker. Raises ImageError if one
    cannot be; OSError if that could not be noted, or one cannot be opened: none has failed then."""
    note = arena / SYNCING  # empty: there is no need of room in the arena, which may be full
    if is_there(note):
        _require_no_error(directory, arena)
    else:
        open_new(note).close()
    for name in names:
        _sync_one(directory / name, arena)
    note.unlink()


def _sync_one(file: Path, arena: Path) -> None:
    with opened_to_sync(file) as fd:
        try:
            os.fsync(fd)
        except OSError as exc:
            _note_unsynced(arena, file.name)
            raise _unsynced(file) from exc


def _require_no_error(directory: Path, arena: Path) -> None:
    """A drain was killed while it synced, and may have been told of an error. Whoever syncs a whole
    file system is told as well, of any file, if nobody has been so since: Linux 5.8."""
    with _opened(directory) as fd:
        try:
            _sync_file_system(fd)
        except OSError as exc:
            _note_unsynced(arena, "")
            raise _unsynced(directory) from exc


@contextmanager
def _opened(directory: Path) -> Iterator[int]:
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield fd
    finally:
        os.close(fd)


def _sync_file_system(fd: int) -> None:
    if ctypes.CDLL(None, use_errno=True).syncfs(fd) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))


def _note_unsynced(arena: Path, name: str) -> None:
    os.rename(arena / SYNCING, arena / UNSYNCED)
    with suppress(OSError), open(arena / UNSYNCED, "wb") as file:  # there may be no room for a name
        file.write(os.fsencode(name))


def _unsynced(file: Path) -> ImageError:
    return ImageError(
        f"{file} could not be synced: it may not be what was dumped, whatever a later sync says; "
        "the checkpoint is only in memory, and is not drained any more: take another"
    )
