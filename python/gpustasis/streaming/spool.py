# SPDX-License-Identifier: Apache-2.0
"""Where a dump goes before it is sent, and a stream before it is restored."""

from __future__ import annotations

import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis.files import sync_directory
from gpustasis.image.checkpoint import STORE_ROOT
from gpustasis.image.directory import DirectoryLock, share, try_exclude
from gpustasis.streaming.tree import resident_bytes
from gpustasis.text import mib

log = logging.getLogger(__name__)

SPOOL = STORE_ROOT / "spool"
RECEIVED = STORE_ROOT / "received"
_YOUNG_S = 60.0
SYNC_EVERY = 256 << 20  # bytes that are written before they are synced, so that no sync is long


def private_place(place: Path) -> None:
    """Make the directory `place` for this user alone, if it is not there. Raises CheckpointError if
    others could write to it."""
    try:
        place.mkdir(mode=0o700, parents=True, exist_ok=True)
        found = place.stat()
    except OSError as exc:
        raise CheckpointError(f"cannot make {place}: {exc.strerror}") from exc
    if found.st_uid != os.geteuid() or (found.st_mode & 0o022 and not found.st_mode & 0o1000):
        raise CheckpointError(f"others could change what is in {place}; name another directory")


@contextmanager
def spool_for(root: int, place: Path | None) -> Iterator[Path]:
    """A new directory for a dump of the tree below `root`; who takes it away is the caller.

    Raises CheckpointError if there is less space than the tree has memory in use.
    """
    above = SPOOL if place is None else place.absolute()
    private_place(above)
    _tell_of_dead_senders(above)
    images = Path(tempfile.mkdtemp(prefix=f"{root}-", dir=above))
    try:
        free, used = free_bytes(images), resident_bytes(root)
        if free < used:
            raise CheckpointError(
                f"{above} has {mib(free)} free, and the processes use {mib(used)} of memory: name "
                "a directory with more space with --spool"
            )
    except BaseException:
        with suppress(OSError):  # an empty directory, which the next sender names
            images.rmdir()
        raise
    with share(images):
        yield images


def free_bytes(directory: Path) -> int:
    """What may still be written there."""
    found = os.statvfs(directory)
    return found.f_bavail * found.f_frsize


def remove(directory: Path) -> None:
    """A directory of files. Raises CheckpointError."""
    try:
        shutil.rmtree(directory)
        sync_directory(directory.parent)
    except OSError as exc:
        raise CheckpointError(f"cannot remove {directory}: {exc.strerror}") from exc


def drop(directory: Path) -> str:
    """remove(), where something more important is to be told: what to add to that, if the directory
    stays."""
    try:
        remove(directory)
    except CheckpointError as exc:
        return f"; {exc}: remove it, nobody needs it"
    return ""


def drop_but_log(directory: Path, name: str, text: str) -> str:
    """`text`, with what drop() adds; criu's log of that name, where it is in there and the text
    speaks of it, is kept elsewhere, and the text says where."""
    criu_log = directory / name
    if str(criu_log) in text and criu_log.exists():
        try:
            handle, kept = tempfile.mkstemp(prefix="gpustasis-", suffix=f"-{name}")
            os.close(handle)
            text = text.replace(str(criu_log), str(shutil.copyfile(criu_log, kept)))
        except OSError as exc:
            return f"{text}; {criu_log} cannot be copied, and stays: {exc.strerror}"
    return text + drop(directory)


def sweep_received(above: Path) -> None:
    """Remove what receivers that were killed have left there half made, and name what they have
    left whole: it may be all that there is of a job."""
    for part in sorted(above.glob(".*.part")):
        if (lock := _left_alone(part)) is not None:
            with lock:
                log.warning("%s was left by a receiver that died, and is removed", part)
                remove(part)
                with suppress(FileNotFoundError):
                    part.with_name(f"{part.name}.gpustasis").unlink()
    for whole in sorted(above.glob("[0-9a-f]*")):
        if (lock := _left_alone(whole)) is not None:
            lock.close()
            log.warning(
                "%s was received whole, and not restored: `gpustasis restore -D %s` restores it if "
                "the job runs nowhere; remove it when it is not needed",
                *(whole, whole),
            )


def _left_alone(directory: Path) -> DirectoryLock | None:
    """A lock of a directory of this user's own that nobody works on; None: it is none. One that was
    made just now may be about to be locked."""
    try:
        found = directory.lstat()
    except OSError:
        return None
    young = time.time() < found.st_mtime + _YOUNG_S
    if young or not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        return None
    with suppress(CheckpointError):
        return try_exclude(directory)
    return None


def _tell_of_dead_senders(above: Path) -> None:
    """Not removed: a job whose dump was broken off may need what is there."""
    for left in sorted(above.glob("[0-9]*-*")):
        lock = None
        with suppress(CheckpointError):
            lock = try_exclude(left)
        if lock is not None:
            lock.close()
            log.warning(
                "%s is the spool of a stream that did not arrive, or was sent to nobody who "
                "answers; remove it when it is not needed",
                left,
            )
