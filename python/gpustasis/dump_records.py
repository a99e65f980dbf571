# SPDX-License-Identifier: Apache-2.0
"""What a dump that was broken off has written down about a process, outside of its images."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpustasis._core import (
    DropRecord,
    DumpLock,
    find_checkpoint_record,
    find_drop_record,
    find_filling_record,
    give_signals_back,
    is_drop_over,
    list_checkpoint_records,
    list_drop_records,
    remove_checkpoint_record,
)
from gpustasis.errors import CheckpointError
from gpustasis.task import read_task

log = logging.getLogger(__name__)
_POLL_S = 0.1


@contextmanager
def alone_with(pid: int, who: str = "gpustasis recover") -> Iterator[None]:
    """Nobody dumps or recovers process `pid` meanwhile. who: this program, named to others. Raises
    CheckpointError if somebody does, or if that cannot be told."""
    try:
        lock = DumpLock(read_task(pid).pid, f"{who}, process {os.getpid()}")
    except (ValueError, OSError, NotImplementedError) as exc:
        raise CheckpointError(f"process {pid} was left as it is: {exc}") from exc
    try:
        if lock.why_not is not None:
            log.warning("nothing keeps a dump from process %s meanwhile: %s", pid, lock.why_not)
        yield
    finally:
        lock.close()


def find_images(pid: int) -> Path | None:
    """The directory that process `pid` was dumped into, by the records that a dump left which was
    broken off; None: no memory is missing, and there is no such directory.

    Raises CheckpointError if memory is missing and the directory is no longer there, or there is no
    such process.
    """
    record = find_dropped(read_task(pid).pid)
    if record is None:
        begun = find_begun(pid)
        if begun is None or not is_directory_of(begun, Path(begun.directory)):
            return None
        return Path(begun.directory)
    images = Path(record.directory)
    try:
        images.stat()
    except OSError as exc:
        raise CheckpointError(
            f"{images}, where memory of process {pid} is: {exc.strerror}"
        ) from exc
    if not is_directory_of(record, images):
        raise CheckpointError(
            f"{images} is not the directory any more that memory of process {pid} was dumped into; "
            "name that one with -D"
        )
    return images


def find_dropped(pid: int) -> DropRecord | None:
    """That memory of the process is missing. Raises CheckpointError if that cannot be told."""
    try:
        return find_drop_record(pid)
    except (ValueError, OSError) as exc:
        raise CheckpointError(
            f"cannot read whether memory of process {pid} is missing: {exc}"
        ) from exc


def find_missing(pid: int) -> DropRecord | None:
    """That memory of the process may be in a dump alone: it was dropped, or handed over by the
    driver, and was not put back since. Raises CheckpointError if that cannot be told."""
    dropped = find_dropped(pid)
    if dropped is not None:
        return dropped
    begun = find_begun(pid)
    return begun if begun is not None and begun.handed_over else None


def list_missing() -> list[DropRecord]:
    """The same of all processes that live. Raises OSError, ValueError."""
    dropped = list_drop_records()
    told = {record.pid for record in dropped}
    begun = list_checkpoint_records()
    return dropped + [one for one in begun if one.handed_over and one.pid not in told]


def why_needed(images: Path) -> str:
    """Whose memory may be in the dump in `images` alone: who removes that ends the process. Empty:
    nobody's. Raises CheckpointError if it cannot be told."""
    try:
        needs = next((one for one in list_missing() if is_directory_of(one, images)), None)
    except (OSError, ValueError) as exc:
        raise CheckpointError(
            f"it cannot be told whose memory is in {images} alone: {exc}"
        ) from exc
    if needs is None:
        return ""
    return (
        f"it holds memory that is missing in process {needs.pid}, which `gpustasis recover "
        f"{needs.pid}` puts back"
    )


def unblock_signals(pid: int, restore_thread: int) -> bool:
    """The driver's thread in the process has signals blocked that it did not block before the dump,
    if criu and its worker were killed while they used it. The rest of a recovery does not depend on
    it, so what fails is a warning, and False: the record must stay for the next one."""
    try:
        if give_signals_back(pid, restore_thread):
            log.info("thread %s of process %s has its signal mask back", restore_thread, pid)
    except (ValueError, OSError, RuntimeError) as exc:  # also: there can be no more threads
        log.warning(
            "thread %s of process %s may keep signals blocked, and calls such as setuid() of the "
            "process may wait for ever: %s; run the same command again to try it again",
            *(restore_thread, pid, exc),
        )
        return False
    return True


def find_begun(pid: int) -> DropRecord | None:
    """That a dump has had the driver checkpoint the process. Its memory is there then, but for what
    a record of dropped memory names; one that a restore has left checkpointed may lack all of it.
    """
    try:
        return find_checkpoint_record(pid)
    except (ValueError, OSError) as exc:
        raise CheckpointError(
            f"cannot read which dump has had process {pid} checkpointed: {exc}"
        ) from exc


def find_filling(pid: int) -> DropRecord | None:
    """That somebody was putting GPU memory back into the process that a dump was handed, and has
    not said that it is done; filled: all of it was there. Raises CheckpointError if that cannot be
    told."""
    try:
        return find_filling_record(pid)
    except (ValueError, OSError) as exc:
        raise CheckpointError(
            f"cannot read whether GPU memory of process {pid} was being put back: {exc}"
        ) from exc


def require_whole(pid: int) -> None:
    """Raise CheckpointError if memory of a process that runs or is locked is missing, by the
    records: all is put back, and the record removed, before the driver may restore the process."""
    record = find_dropped(pid)
    if record is not None:
        raise CheckpointError(
            f"process {pid} runs or is locked, and its memory was not put back from "
            f"{record.directory}: "
            "another program had the driver restore it; its GPU memory is wrong. End it, and "
            "restore it from a checkpoint"
        )
    filling = find_filling(pid)
    if filling is not None and not filling.filled:
        raise CheckpointError(
            f"process {pid} runs or is locked, and whoever was putting its GPU memory back from "
            f"{filling.directory} has died before all of it was there: its GPU memory is wrong. "
            "End it, and restore it from a checkpoint"
        )


def forget_begun(pid: int, *, has_signals: bool) -> None:
    """Remove the record that find_begun() finds: the process has been brought back. has_signals: as
    unblock_signals() has said; else whoever tries again needs the record."""
    if not has_signals:
        return
    try:
        remove_checkpoint_record(pid)
    except (ValueError, OSError) as exc:  # it says nothing wrong of this process
        log.warning("cannot remove the record of the dump of process %s: %s", pid, exc)


def is_directory_of(record: DropRecord, images: Path) -> bool:
    """Whether the dump of the record was writing to `images`, wherever that lies by now."""
    try:
        found = images.stat()
    except OSError:
        return False
    return (found.st_dev, found.st_ino) == (record.device, record.inode)


def wait_for_drop(pid: int, thread: int, timeout_s: float) -> None:
    """A criu that was killed may have pointed the restore thread at the call that drops memory; the
    thread makes that call all the same, and what was put back before would be lost. Raises
    CheckpointError if that lasts."""
    deadline = time.monotonic() + timeout_s
    while not is_drop_over(pid, thread):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"the restore thread {thread} of process {pid} has not come back to a call of its "
                "own: it may still drop memory; nothing was changed"
            )
        time.sleep(_POLL_S)
