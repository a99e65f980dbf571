"""Bring back a task left locked or checkpointed by a criu that died.

The plugin has a worker that does so by itself when criu dies; this is for when it could not (it was
killed too, or the machine had no room for it).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    Encoding,
    ImageReader,
    Manifest,
    RegionKind,
    image_name,
    read_manifest,
)
from gpustasis.criu.statistics import find_statistics, statistics_path
from gpustasis.driver import Driver, ProcessState
from gpustasis.errors import CheckpointError, DriverError, ImageError
from gpustasis.task import Task, boot_id, find_users, read_task

log = logging.getLogger(__name__)

WORKER_COMM = "gpustasis-work"  # src/cuda_plugin/worker_process.cpp
WORKER_TIMEOUT_S = 60.0
_POLL_S = 0.1
_PAGE_SIZE = os.sysconf("SC_PAGE_SIZE")
_EMPTY = bytes(_PAGE_SIZE)
_PROTECTIONS = {1: "r", 2: "w", 4: "x"}  # PROT_*, and as in /proc/PID/maps
_PRESENT_OR_SWAPPED = 3 << 62  # bits 63 and 62 of an entry of /proc/PID/pagemap

Progress = Callable[[int], None]


class Outcome(StrEnum):
    """What there was to do."""

    RUNS = "runs: there was nothing to do"
    UNLOCKED = "was locked, and runs again"
    LEFT_LOCKED = "is locked, as the dump found it"
    RESTORED = "was checkpointed, and runs again"
    RESTORED_LOCKED = "was checkpointed, and is locked again, as the dump found it"
    LEFT_CHECKPOINTED = "is checkpointed, as the dump found it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The outcome, and how many bytes of GPU memory were put back into the task for it."""

    outcome: Outcome
    refilled_bytes: int


def recover(
    pid: int,
    images: Path,
    driver: Driver,
    *,
    threads: int = 0,
    on_progress: Progress | None = None,
) -> Recovery:
    """Bring back process `pid`, whose dump into `images` was broken off.

    threads: that put memory back; 0: one for each processor. on_progress: told the bytes done.
    Raises ImageError if the images are damaged or of another process, DriverError if the driver
    refuses, CheckpointError if the process is not in a state to be recovered; the process is left
    as it was found then, or, after a refusal of the driver, as far as it came.
    """
    task = _settled_task(pid, images)
    state = driver.get_state(pid)
    log.info("process %s is %s", pid, state.name)
    if state is ProcessState.RUNNING:
        return Recovery(outcome=Outcome.RUNS, refilled_bytes=0)
    if state not in (ProcessState.LOCKED, ProcessState.CHECKPOINTED):
        raise CheckpointError(
            f"process {pid} is in the driver's state {state.name}: it cannot be brought back; "
            "end it and restore it from a checkpoint"
        )
    _require_unfinished(images)
    manifest = _find_manifest(images)
    before = _state_before(manifest, task)
    refilled = 0
    if state is ProcessState.CHECKPOINTED:
        if before is ProcessState.CHECKPOINTED:
            return Recovery(outcome=Outcome.LEFT_CHECKPOINTED, refilled_bytes=0)
        refilled = _refill(task, images, manifest, threads, on_progress)
        driver.init()
        driver.restore(pid)
    if before is not ProcessState.RUNNING:
        left = Outcome.LEFT_LOCKED if state is ProcessState.LOCKED else Outcome.RESTORED_LOCKED
        return Recovery(outcome=left, refilled_bytes=refilled)
    _unlock(pid, driver)
    done = Outcome.UNLOCKED if state is ProcessState.LOCKED else Outcome.RESTORED
    return Recovery(outcome=done, refilled_bytes=refilled)


def _settled_task(pid: int, images: Path) -> Task:
    """The task, once nobody else is busy with it."""
    deadline = time.monotonic() + WORKER_TIMEOUT_S
    while workers := find_users(images, WORKER_COMM):
        if time.monotonic() > deadline:
            raise CheckpointError(
                f"the driver worker {workers[0]} of that criu is still at it; "
                "wait for it, or end it and try again"
            )
        time.sleep(_POLL_S)
    task = read_task(pid)
    if task.tracer:
        raise CheckpointError(
            f"process {pid} is traced by process {task.tracer}; end that one first"
        )
    if task.state in ("T", "t"):
        raise CheckpointError(
            f"process {pid} is stopped, and the driver cannot reach it; kill -CONT {pid} first"
        )
    return task


def _require_unfinished(images: Path) -> None:
    """Refuse the images of a dump that came to its end: another one left the task behind. Statistics
    are written last; those older than the manifest are of an earlier dump into the same place."""
    statistics = find_statistics(images, "dump")
    manifest = images / MANIFEST_NAME
    if statistics is None or not statistics.succeeded or not manifest.exists():
        return
    if statistics_path(images, "dump").stat().st_mtime_ns >= manifest.stat().st_mtime_ns:
        raise CheckpointError(
            f"the dump into {images} was not broken off; name the directory of the one that was"
        )


def _find_manifest(images: Path) -> Manifest | None:
    """None: the dump did not come so far as to take anything out of a task."""
    if not (images / MANIFEST_NAME).exists():
        return None
    try:
        return read_manifest(images)
    except (ValueError, OSError, NotImplementedError) as exc:
        raise ImageError(f"cannot read the manifest in {images}: {exc}") from exc


def _state_before(manifest: Manifest | None, task: Task) -> ProcessState:
    for entry in manifest.tasks if manifest else ():
        if entry.pid == task.inner_pid:
            return ProcessState[entry.state_before.name]
    return ProcessState.RUNNING


def _refill(
    task: Task,
    images: Path,
    manifest: Manifest | None,
    threads: int,
    on_progress: Progress | None,
) -> int:
    """Put back what was taken out of the task; bytes of it.

    The plugin drops pages only after it has named the image and its digest in the manifest: with
    no such entry all pages are where the driver put them.
    """
    entries = manifest.tasks if manifest else ()
    found = [entry for entry in entries if entry.pid == task.inner_pid and entry.externalized]
    if not found:
        return 0
    path = images / image_name(task.inner_pid)
    try:
        image = ImageReader.open(path)
        if image.info.start_time != task.start_time or image.info.boot_id != boot_id():
            raise ImageError(f"{path} is of another process than {task.pid}; nothing was changed")
        if image.digest != found[0].digest:
            raise ImageError(f"{path} is not the one that the manifest names; nothing was changed")
        image.attach_sources()
        image.verify(threads)
        _require_mapped(task, image)
        _require_same_pages(task, image)
        image.restore_to_process(task.pid, threads, progress=on_progress)
    except (ValueError, OSError, NotImplementedError) as exc:
        raise ImageError(f"cannot put back {path}: {exc}") from exc
    return sum(region.length for region in image.info.regions)


def _require_mapped(task: Task, image: ImageReader) -> None:
    """Refuse an image of another time: the task maps each region as it did. Of what is not mapped
    no page is there, and that must not pass for a page that was dropped."""
    lines = Path(f"/proc/{task.pid}/maps").read_text(errors="replace").splitlines()
    for region in image.info.regions:
        flags = "".join(
            letter if region.protection & bit else "-" for bit, letter in _PROTECTIONS.items()
        ) + ("p" if region.kind == RegionKind.PRIVATE_ANONYMOUS else "s")
        at = region.address
        for line in lines:
            span, found = line.split(maxsplit=2)[:2]
            begin, end = (int(bound, 16) for bound in span.split("-"))
            if begin <= at < end and found == flags:
                at = end
        if at < region.address + region.length:
            raise _other(task, at)


def _require_same_pages(task: Task, image: ImageReader) -> None:
    """Refuse an image of another time: the pages that are still there must be what it holds.

    Some of them may be empty instead, as long as others are not there at all: who is killed while he
    puts pages back may have got some and not filled them yet, and whoever reads a page gets one.
    The driver leaves no page out: where all are there, they are what it put there.
    """
    empty: int | None = None
    refilled = True
    with (
        open(f"/proc/{task.pid}/pagemap", "rb", buffering=0) as pagemap,
        open(f"/proc/{task.pid}/mem", "rb", buffering=0) as memory,
    ):
        for index in range(len(image)):
            chunk = image.chunk(index)
            count = chunk.plain_size // _PAGE_SIZE
            pagemap.seek(chunk.address // _PAGE_SIZE * 8)
            entries = memoryview(pagemap.read(count * 8)).cast("Q")
            there = [entry & _PRESENT_OR_SWAPPED != 0 for entry in entries]
            if not any(there):
                refilled = refilled and chunk.encoding == Encoding.ZERO
                continue
            stored = image.read_chunk(index)
            if all(there) and os.pread(memory.fileno(), chunk.plain_size, chunk.address) == stored:
                continue
            for page in range(count):
                address = chunk.address + page * _PAGE_SIZE
                wanted = stored[page * _PAGE_SIZE : (page + 1) * _PAGE_SIZE]
                if not there[page]:  # and so it is not read: that would give it one
                    refilled = refilled and wanted == _EMPTY
                    continue
                live = os.pread(memory.fileno(), _PAGE_SIZE, address)
                if live != wanted:
                    empty = empty or address
                    if live != _EMPTY:
                        raise _other(task, address)
    if empty is not None and refilled:
        raise _other(task, empty)


def _other(task: Task, address: int) -> ImageError:
    return ImageError(
        f"process {task.pid} holds something else at {address:#x} than the image: "
        "it was checkpointed again since; nothing was changed"
    )


def _unlock(pid: int, driver: Driver) -> None:
    """Believe the state, not the answer: a driver may report an error and have done it."""
    try:
        driver.unlock(pid)
    except DriverError:
        if driver.get_state(pid) is not ProcessState.RUNNING:
            raise
