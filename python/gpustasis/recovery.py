# SPDX-License-Identifier: Apache-2.0
"""Bring back a task left locked or checkpointed by a criu that died.

The plugin has a worker that does so by itself when criu dies; this is for when it could not (it was
killed too, or the machine had no room for it).
"""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from gpustasis._core import (
    DataKey,
    DropRecord,
    Manifest,
    ManifestTask,
    MemoryKind,
    image_name,
)
from gpustasis.driver import Driver, ProcessState
from gpustasis.dump_records import (
    alone_with,
    find_begun,
    find_dropped,
    forget_begun,
    is_directory_of,
    require_whole,
    unblock_signals,
    wait_for_drop,
)
from gpustasis.dumped import Dumped, Progress, find_stored, is_sealed, told_in
from gpustasis.errors import CheckpointError, DriverError, ImageError, SealError
from gpustasis.task import (
    Task,
    boot_id,
    find_users,
    has_driver_thread,
    misleading_thread,
    read_task,
)

log = logging.getLogger(__name__)

WORKER_COMM = "gpustasis-work"  # src/cuda_plugin/worker_process.cpp
GUARDIAN_COMM = "gpustasis-guard"  # src/cuda_plugin/guardian.hpp
WORKER_TIMEOUT_S = 60.0
_POLL_S = 0.1


class Outcome(StrEnum):
    """What there was to do."""

    RUNS = "runs: there was nothing to do"
    UNLOCKED = "was locked, and runs again"
    UNLOCKED_AFTER_RESTORE = "was left locked by a restore, and runs again"
    LEFT_LOCKED = "is locked, as the dump found it"
    RESTORED = "was checkpointed, and runs again"
    RESTORED_LOCKED = "was checkpointed, and is locked again, as the dump found it"
    LEFT_CHECKPOINTED = "is checkpointed, as the dump found it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """The outcome, and how many bytes of GPU memory were put back into the task for it."""

    outcome: Outcome
    refilled_bytes: int


def find_unharmed(pid: int, images: Path, key: DataKey | None = None) -> Recovery | None:
    """What there is to do for a process of which the dump into `images` stored CPU memory alone:
    nothing, for it was not changed, and no driver has to be asked. None: another process. key: of
    images that are sealed.

    Raises CheckpointError if a living criu still holds it; ImageError.
    """
    task = read_task(pid)
    dumped = _dumped(images, key)
    manifest = dumped.find_manifest(task.pid, task.inner_pid)
    kinds = {e.kind for e in manifest.tasks if e.pid == task.inner_pid} if manifest else set()
    if kinds != {MemoryKind.CPU} or find_dropped(pid) is not None or has_driver_thread(pid):
        return None
    info = dumped.info(image_name(task.inner_pid, MemoryKind.CPU))
    if (info.boot_id, info.start_time) != (boot_id(), task.start_time):
        return None
    _require_untraced(task)
    return Recovery(outcome=Outcome.RUNS, refilled_bytes=0)


def recover(
    pid: int,
    images: Path | None,
    driver: Driver,
    *,
    key: DataKey | None = None,
    threads: int = 0,
    on_progress: Progress | None = None,
) -> Recovery:
    """Bring back process `pid`, whose dump into `images` was broken off.

    images: None: find_images() has found none. A process that the driver has checkpointed is only
    brought back if a dump of it was broken off, by a record or by an image of this very process in
    `images`: nothing tells else whether its GPU memory is there. key: of images that are sealed.
    threads: that put memory back; 0: one for each processor. on_progress: told the bytes done.
    Raises ImageError if the images are damaged or of another process, DriverError if the driver
    refuses, CheckpointError if the process is not in a state to be recovered, or a dump of it is
    under way; the process is left as it was found then, or, after a refusal of the driver, as far
    as it came.
    """
    dumped = None if images is None else _dumped(images, key)
    with alone_with(pid):
        return _recover(pid, dumped, driver, threads, on_progress)


def _recover(
    pid: int,
    dumped: Dumped | None,
    driver: Driver,
    threads: int,
    on_progress: Progress | None,
) -> Recovery:
    """See recover()."""
    images = None if dumped is None else dumped.images
    task = _settled_task(pid, images)
    if misled := misleading_thread(pid):
        raise CheckpointError(f"{misled}; the driver is not asked about it")
    state = driver.get_state(pid)
    log.info("process %s is %s", pid, state.name)
    if state in (ProcessState.RUNNING, ProcessState.LOCKED):
        require_whole(pid)
        has_signals = _unblock_signals(pid, driver)
    if state is ProcessState.RUNNING:
        forget_begun(pid, has_signals=has_signals)
        return Recovery(outcome=Outcome.RUNS, refilled_bytes=0)
    if state not in (ProcessState.LOCKED, ProcessState.CHECKPOINTED):
        raise CheckpointError(
            f"process {pid} is in the driver's state {state.name}: it cannot be brought back; "
            "end it and restore it from a checkpoint"
        )
    if state is ProcessState.LOCKED and dumped is not None and _was_restored(task, dumped):
        _unlock(pid, driver)
        return Recovery(outcome=Outcome.UNLOCKED_AFTER_RESTORE, refilled_bytes=0)
    if state is ProcessState.CHECKPOINTED and images is None and find_begun(pid) is None:
        raise CheckpointError(
            f"process {pid} is checkpointed, and no record says into which directory; if a dump "
            "was broken off, name its directory with -D; if a restore was, end the process and "
            "restore it again: its GPU memory may not be there"
        )
    manifest = None
    if dumped is not None:
        dumped.require_unfinished()
        manifest = dumped.find_manifest(task.pid, task.inner_pid)
        _require_recorded(task, dumped.images, manifest)
    before = _state_before(manifest, task, state)
    refilled = 0
    if state is ProcessState.CHECKPOINTED:
        if before is ProcessState.CHECKPOINTED:
            return Recovery(outcome=Outcome.LEFT_CHECKPOINTED, refilled_bytes=0)
        wait_for_drop(pid, driver.get_restore_thread_id(pid), WORKER_TIMEOUT_S)
        has_signals, refilled = _restore(task, dumped, manifest, driver, (threads, on_progress))
    if before is not ProcessState.RUNNING:
        forget_begun(pid, has_signals=has_signals)
        left = Outcome.LEFT_LOCKED if state is ProcessState.LOCKED else Outcome.RESTORED_LOCKED
        return Recovery(outcome=left, refilled_bytes=refilled)
    _unlock(pid, driver)
    forget_begun(pid, has_signals=has_signals)
    done = Outcome.UNLOCKED if state is ProcessState.LOCKED else Outcome.RESTORED
    return Recovery(outcome=done, refilled_bytes=refilled)


def _restore(
    task: Task,
    dumped: Dumped | None,
    manifest: Manifest | None,
    driver: Driver,
    options: tuple[int, Progress | None],
) -> tuple[bool, int]:
    """Have the driver restore the process with all its memory. Whether it has its signals back, and
    bytes that were put back."""
    begun = find_begun(task.pid)
    if begun is not None and begun.handed_over:
        has_signals = _unblock_signals(task.pid, driver)
        return has_signals, _hand_back(task, begun, dumped, driver, options)
    refilled = 0 if dumped is None else _refill(task, dumped, manifest, *options)
    has_signals = _unblock_signals(task.pid, driver)
    driver.init()
    driver.restore(task.pid)
    return has_signals, refilled


def _settled_task(pid: int, images: Path | None) -> Task:
    """The task, once nobody else is busy with it."""
    deadline = time.monotonic() + WORKER_TIMEOUT_S
    while images and (busy := find_users(images, WORKER_COMM, GUARDIAN_COMM)):
        if time.monotonic() > deadline:
            raise CheckpointError(_why_busy(pid, images, busy[0]))
        time.sleep(_POLL_S)
    task = read_task(pid)
    _require_untraced(task)
    if task.state in ("T", "t"):
        raise CheckpointError(
            f"process {pid} is stopped, and the driver cannot reach it; kill -CONT {pid} first"
        )
    return task


def _require_untraced(task: Task) -> None:
    if task.tracer:
        raise CheckpointError(
            f"process {task.pid} is traced by process {task.tracer}; end that one first"
        )


def _why_busy(pid: int, images: Path, busy: int) -> str:
    """Nobody is told to end a worker while there is a guardian, or that: the task would read zeros
    for what is not back yet, and run on."""
    guardians = find_users(images, GUARDIAN_COMM)
    begun = find_begun(pid)
    if not guardians and begun is not None and begun.handed_over:
        return (
            f"process {busy} has the GPU memory of process {pid}, perhaps alone, and stores it or "
            "puts it back: wait for it, and do not end it"
        )
    if not guardians:
        return (
            f"process {busy}, which that criu has left to do the same, is still at it; wait for "
            "it, or end it and try again"
        )
    with suppress(ImageError):  # what is not to be done has to be said all the same
        images = told_in(images)
    guarded = "the process that it guards" if find_dropped(pid) is None else f"process {pid}"
    return (
        f"process {guardians[0]} guards memory that it cannot put back yet; gpustasis-undo.log in "
        f"{images} says why. Make the images readable again, and it goes on by itself, or end "
        f"{guarded} and restore it from a checkpoint. Do not end the guard: the process would run "
        "on with zeros"
    )


def _unblock_signals(pid: int, driver: Driver) -> bool:
    """Whether the record of the dump is needed no longer. A recovery does not depend on it."""
    try:
        return find_begun(pid) is None or unblock_signals(pid, driver.get_restore_thread_id(pid))
    except CheckpointError as exc:
        log.warning("threads of process %s may keep signals blocked: %s", pid, exc)
        return False


def _require_begun(task: Task, images: Path, manifest: Manifest | None) -> None:
    """The dump that was broken off was writing to `images`, though it has put no image of the
    process there: the driver has checkpointed it for that dump, and not a restore made it so."""
    begun = find_begun(task.pid)
    if begun is None:
        raise CheckpointError(
            f"process {task.pid} is checkpointed, and nothing says that a dump into {images} did "
            "that: its GPU memory may not be there; nothing was changed. If a dump was broken off, "
            "name its directory; if a restore was, end the process and restore it again"
        )
    if is_directory_of(begun, images):
        return
    if manifest is None or manifest.checkpoint_id != begun.checkpoint_id:
        raise CheckpointError(
            f"process {task.pid} was checkpointed by a dump into {begun.directory}, and {images} "
            "does not hold that dump; nothing was changed"
        )


def _is_gpu_memory(entry: ManifestTask, task: Task) -> bool:
    """CPU memory is never taken out of a process, and never put back."""
    return entry.pid == task.inner_pid and entry.externalized and entry.kind == MemoryKind.GPU


def _require_recorded(task: Task, images: Path, manifest: Manifest | None) -> None:
    """Memory that is missing, by its record, is that of the dump in `images`."""
    record = find_dropped(task.pid)
    if record is None:
        return
    for entry in manifest.tasks if manifest else ():
        if _is_gpu_memory(entry, task):
            assert manifest is not None
            if (manifest.checkpoint_id, entry.digest) == (record.checkpoint_id, record.digest):
                return
    raise CheckpointError(
        f"memory of process {task.pid} was dumped into {record.directory}, and {images} does not "
        "hold that dump; nothing was changed"
    )


def _was_restored(task: Task, dumped: Dumped) -> bool:
    """CRIU made the process of a checkpoint in `images`: one of this pid and name is in it, and
    the process has another start time. If it is locked, the driver has put its GPU memory back: a
    restore that ends there (criu and its worker were killed) has but left out the last call."""
    manifest = dumped.find_manifest(task.pid, task.inner_pid)
    for entry in manifest.tasks if manifest else ():
        if not _is_gpu_memory(entry, task):
            continue
        info = dumped.info(image_name(entry.pid))
        try:
            comm = Path(f"/proc/{task.pid}/comm").read_text(errors="surrogateescape").rstrip("\n")
        except (FileNotFoundError, ProcessLookupError) as exc:
            raise CheckpointError(f"process {task.pid} has ended") from exc
        other = (info.boot_id, info.start_time) != (boot_id(), task.start_time)
        return other and info.comm == comm
    return False


def _dumped(images: Path, key: DataKey | None) -> Dumped:
    if not is_sealed(images):
        return Dumped(find_stored(images))
    if key is None:
        raise SealError(
            f"the dump into {images} is sealed: name the private key that opens it, with --key or "
            "--key-command"
        )
    return Dumped(images, key)


def _state_before(manifest: Manifest | None, task: Task, state: ProcessState) -> ProcessState:
    begun = None
    with suppress(CheckpointError):  # of a record that cannot be read: as if there were none
        begun = find_begun(task.pid)
    # The record is of the last dump that was broken off, and the directory may be another one's.
    # A dump writes none of a task that was checkpointed before.
    is_of_record = begun is None or (manifest and begun.checkpoint_id == manifest.checkpoint_id)
    for entry in manifest.tasks if manifest else ():
        if entry.pid == task.inner_pid and entry.kind == MemoryKind.GPU:
            before = ProcessState[entry.state_before.name]
            if is_of_record or before is state is ProcessState.CHECKPOINTED:
                return before
    return ProcessState.LOCKED if begun and begun.was_locked else ProcessState.RUNNING


def _refill(
    task: Task,
    dumped: Dumped,
    manifest: Manifest | None,
    threads: int,
    on_progress: Progress | None,
) -> int:
    """Put back what was taken out of the task; bytes of it.

    The plugin drops pages only after it has named the image and its digest in the manifest: with
    no such entry all pages are where the driver put them, if a dump had it put them there.
    """
    for entry in manifest.tasks if manifest else ():
        if _is_gpu_memory(entry, task):
            break
    else:
        _require_begun(task, dumped.images, manifest)
        return 0
    assert manifest is not None
    return dumped.refill(
        *(task.pid, image_name(task.inner_pid), (manifest.checkpoint_id, entry.digest)),
        *(threads, on_progress),
    )


def _hand_back(
    task: Task,
    begun: DropRecord,
    dumped: Dumped | None,
    driver: Driver,
    options: tuple[int, Progress | None],
) -> int:
    """Have the driver restore the process with memory that it had handed over to a dump: the image
    of that dump alone has it, and has its name once it is complete; bytes of it."""
    name = image_name(task.inner_pid)
    found = None if dumped is None else dumped.digests(name)
    if dumped is None or found is None or found[0] != begun.checkpoint_id:
        raise CheckpointError(
            f"the driver has handed the GPU memory of process {task.pid} over to a dump into "
            f"{begun.directory}, and {name} of that dump is not there: if it was never complete, "
            "the memory is lost: end the process, and restore it from an earlier checkpoint"
        )
    driver.init()
    return dumped.hand_back(task.pid, name, found, driver.library, *options)


def _unlock(pid: int, driver: Driver) -> None:
    """Believe the state, not the answer: a driver may report an error and have done it."""
    try:
        driver.unlock(pid)
    except DriverError:
        if driver.get_state(pid) is not ProcessState.RUNNING:
            raise
