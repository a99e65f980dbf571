# SPDX-License-Identifier: Apache-2.0
"""The directory of one job's checkpoints, which one supervisor at a time holds.

jit-000001/ ...       the checkpoints, with a record in each that is whole
gpustasis-jit.lock    locked by the supervisor; says who it is, which process is the job's root,
                      and in the end what became of it
gpustasis-jit-failed.log  criu's log of the last dump that failed
gpustasis-jit-ended   the job has ended well: the number of the last checkpoint before that
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis.criu.images import PSTREE_NAME, prepare_directory, read_pstree
from gpustasis.dump_records import why_needed
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import changeable_by_others, replace_file, sync_directory
from gpustasis.image.directory import is_file, try_exclude
from gpustasis.image.prune import Rules, prune
from gpustasis.image.store import read_entry
from gpustasis.locked_file import SUPERVISOR_NAME, tell, told
from gpustasis.preemption.records import RECORD_NAME, Identity, Record, read_json, read_record
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.task import boot_id, find_users, read_task

ENDED_NAME = "gpustasis-jit-ended"
_CRIU = ("criu", "ld-linux-x86-64")  # as its process is called
FAILED_LOG_NAME = "gpustasis-jit-failed.log"
_UNTOLD = frozenset(
    {
        *(errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.ENOTCONN),
        *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
        *(errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT),
    }
)
_NAME = re.compile(r"jit-([0-9]{6,12})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A directory of the store. record: None: it is no checkpoint of this job that could be
    restored, for the reason `unusable`. foreign: because it is another job's. broken: because it is
    damaged: it was one. failed: because its dump did not come to its end."""

    directory: Path
    number: int
    record: Record | None
    unusable: str
    foreign: bool = False
    broken: bool = False
    failed: bool = False


class JobStore:
    """A context manager: the store is held until it is closed.

    Raises CheckpointError if another supervisor holds it, others could write to it, or a job that
    is left of an earlier supervisor still runs.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory.absolute()
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            wrong = next(changeable_by_others(str(self.directory), owners=(0, os.geteuid())), None)
        except OSError as exc:
            raise CheckpointError(f"cannot use {self.directory}: {exc.strerror}") from exc
        if wrong is not None:
            raise CheckpointError(
                f"{self.directory} is no safe place for a job's memory: {wrong}; whoever can "
                "change a checkpoint decides what runs when it is restored"
            )
        self._fd = _open_lock(self.directory / SUPERVISOR_NAME)
        try:
            self._refuse_two()
            self.tell(supervisor=os.getpid())
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        os.close(self._fd)

    def tell(self, *, because: str = "", **facts: object) -> None:
        """What whoever asks is told of this supervisor from now on: all of it, in one step. Raises
        CheckpointError."""
        try:
            tell(self._fd, {**facts, "because": because} if because else facts)
        except OSError as exc:
            raise CheckpointError(
                f"cannot write {self.directory / SUPERVISOR_NAME}: {exc.strerror}"
            ) from exc

    def tell_root(self, pid: int) -> None:
        """The job runs, or has ended already: process `pid` is its root."""
        try:
            root = {"pid": pid, "start_time": read_task(pid).start_time, "boot": boot_id().hex()}
        except CheckpointError:
            return
        self.tell(supervisor=os.getpid(), root=root)

    def tell_restoring(self, images: Path) -> None:
        """criu is about to bring the job back from `images`, a directory of this store. Raises
        CheckpointError."""
        restoring = {
            "images": images.name,
            "since": read_task(os.getpid()).start_time,
            "boot": boot_id().hex(),
        }
        self.tell(supervisor=os.getpid(), restoring=restoring)

    def _refuse_two(self) -> None:
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = told(self._fd).get("supervisor")
            raise CheckpointError(
                f"another supervisor holds {self.directory}: process {owner or 'unknown'}; a job "
                "has one store for itself"
            ) from None
        state = told(self._fd)
        root = state.get("root")
        if isinstance(root, dict) and root.get("boot") == boot_id().hex():
            pid = root.get("pid")
            if isinstance(pid, int) and 1 < pid < 1 << 31 and _is(pid, root.get("start_time")):
                raise CheckpointError(
                    f"the job of {self.directory} still runs as process {pid}, whose supervisor "
                    "was killed: end it first, for it would run twice"
                )
        self._refuse_restored(state.get("restoring"))

    def _refuse_restored(self, restoring: object) -> None:
        """A supervisor that was killed during a restore knew no root; criu goes on without it."""
        if not isinstance(restoring, dict) or restoring.get("boot") != boot_id().hex():
            return
        name, since = restoring.get("images"), restoring.get("since")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or not isinstance(since, int):
            return
        images = self.directory / name
        if not is_file(images / PSTREE_NAME):
            return
        lock = try_exclude(images)
        if lock is None:
            raise CheckpointError(
                f"a restore of {images}, whose supervisor was killed, is still at work, or "
                "somebody reads it: wait for its end"
            )
        lock.close()
        for pid in (task.pid for task in read_pstree(images)):
            if _began(pid, since):
                raise CheckpointError(
                    f"the job of {self.directory} still runs as process {pid}, restored from "
                    f"{images}, whose supervisor was killed: end it first, for it would run twice"
                )

    def checkpoints(self, job: Identity) -> Iterator[Found]:
        """The newest first, those that cannot be used among them. Raises CheckpointError if the
        disk does not say now what there is."""
        done = self._ended()
        for number, directory in sorted(self._numbered(), reverse=True):
            yield self._look(number, directory, number <= done, job)

    def _look(self, number: int, directory: Path, ended: bool, job: Identity) -> Found:
        def unusable(because: str, **why: bool) -> Found:
            return Found(directory=directory, number=number, record=None, unusable=because, **why)

        try:
            record = read_record(directory)
        except ImageError as exc:
            if not ended and says_nothing(exc):
                raise
            if not ended:
                return unusable(f"cannot be read: {exc}", broken=True)
            record = None
        else:
            if record is None:
                if read_entry(directory).incomplete:
                    because = "is no whole checkpoint: its dump failed or was broken off"
                    return unusable(because, failed=True)
                return unusable("has no record: its dump was cut off, or its job ended well")
        if record is None or ended:
            return unusable("is not restored: the job has ended with status 0 since")
        if difference := job.difference(record.identity):
            return unusable(difference, foreign=True)
        entry = read_entry(directory)
        if entry.incomplete and entry.unread:
            raise CheckpointError(f"cannot look at {directory} now: {entry.unread}")
        if entry.incomplete:
            return unusable(f"is not whole: {entry.incomplete}", broken=True)
        return Found(directory=directory, number=number, record=record, unusable="")

    def new_directory(self) -> Path:
        """An empty one for the next checkpoint. Raises CheckpointError."""
        number = max((number for number, _ in self._numbered()), default=0)
        number = max(number, self._ended(), 0) + 1
        directory = self.directory / f"jit-{number:06d}"
        prepare_directory(directory)
        return directory

    def free_bytes(self) -> int:
        found = os.statvfs(self.directory)
        return found.f_bavail * found.f_frsize

    def end(self) -> None:
        """The job has ended well: what is here now is not for the next start. Raises OSError."""
        last = max((number for number, _ in self._numbered()), default=0)
        fd = os.open(self.directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            replace_file(fd, ENDED_NAME, json.dumps({"last": last}).encode(), 0o600)
        finally:
            os.close(fd)

    def disown(self) -> None:
        """As end(), where the disk has no room to say so: no checkpoint here counts any more.
        Raises OSError, ImageError."""
        for _, directory in self._numbered():
            (directory / RECORD_NAME).unlink(missing_ok=True)
            sync_directory(directory)

    def discard(self, directory: Path) -> bool:
        """Remove what a failed dump has left, but for its log, unless it is whole, or in use:
        memory may still be put back from it. Whether it is gone.

        Raises CheckpointError, also if memory of a process is nowhere else; OSError.
        """
        entry = read_entry(directory)
        if not entry.incomplete or entry.unread:
            return False
        if directory.is_symlink() or find_users(directory, WORKER_COMM, GUARDIAN_COMM, *_CRIU):
            return False
        lock = try_exclude(directory)
        if lock is None:
            return False
        with lock:
            if why_not := why_needed(directory):
                raise CheckpointError(why_not)
            with suppress(FileNotFoundError):
                os.replace(directory / "dump.log", self.directory / FAILED_LOG_NAME)
            shutil.rmtree(directory)
        return True

    def keep_last(self, count: int) -> int:
        """Remove older checkpoints, as `gpustasis prune --keep-last`; how many went. Raises
        CheckpointError."""
        done = prune(self.directory, Rules(last=count))
        return sum(verdict.action == "removed" for verdict in done.verdicts)

    def _numbered(self) -> list[tuple[int, Path]]:
        try:
            names = os.listdir(self.directory)
        except OSError as exc:
            raise ImageError(f"cannot list {self.directory}: {exc.strerror}") from exc
        found = [(name, _NAME.fullmatch(name)) for name in names]
        return [(int(match[1]), self.directory / name) for name, match in found if match]

    def _ended(self) -> int:
        """Raises ImageError: which checkpoints are to be restored cannot be told then."""
        raw = read_json(self.directory / ENDED_NAME)
        if raw is None:
            return -1
        last = raw.get("last") if isinstance(raw, dict) else None
        if not isinstance(last, int) or isinstance(last, bool):
            raise ImageError(f"{self.directory / ENDED_NAME} is damaged: last is {last!r:.80}")
        return last


def says_nothing(exc: CheckpointError) -> bool:
    """Whether it comes from a refusal of the system that says nothing of the checkpoint: a disk
    that does not answer now or is full, this process out of something or not let in."""
    return exc.errno in _UNTOLD


def _open_lock(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    except OSError as exc:
        raise CheckpointError(f"cannot open {path}: {exc.strerror}") from exc


def _began(pid: int, since: int) -> bool:
    """Whether there is such a process, and it is not older than that."""
    try:
        return read_task(pid).start_time >= since
    except CheckpointError:
        return False


def _is(pid: int, start_time: object) -> bool:
    try:
        return read_task(pid).start_time == start_time
    except CheckpointError:
        return False
