# SPDX-License-Identifier: Apache-2.0
"""Take a checkpoint from a stream, and restore it once its sender says that the job has ended."""

from __future__ import annotations

import fcntl
import logging
import os
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.images import read_pstree
from gpustasis.criu.run import Run
from gpustasis.criu.statistics import Statistics
from gpustasis.errors import CheckpointError, StreamError, add_to
from gpustasis.image.checkpoint import CheckpointFiles
from gpustasis.image.directory import DirectoryLock, new_directory, require_free, share
from gpustasis.sealing.keys import KeySource
from gpustasis.streaming import spool
from gpustasis.streaming.answers import Replies
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.records import STREAM_MAGIC, Contents, Decoder, Entry, Header, Kind
from gpustasis.streaming.sealed import Opening
from gpustasis.streaming.signals import Signals
from gpustasis.task import PROC
from gpustasis.text import mib

log = logging.getLogger(__name__)

_ZOMBIES_S = 10.0
_POLL_S = 0.02

Restore = Callable[[Path], Run]


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What came, and how it was restored. directory: where it was put; kept: it still is."""

    stream_id: bytes
    directory: Path
    kept: bool
    files: int
    bytes: int
    run: Run


@dataclass(slots=True, kw_only=True)
class Source:
    """Where a stream comes from. place: where its files go, to stay there; None: to a directory of
    our own, for as long as it takes. may_run: restore also what says that the job was left running,
    or does not say that it has ended. timeout_s: how long it may stall. require: raises
    CheckpointError if what was received cannot be restored here. signed: raises it for a directory
    that nobody has signed who is trusted here. key: what opens a stream that is
    sealed; None: none is taken. foreground: a restore ends
    with the job, which gets what signals come."""

    stream: Descriptor
    replies: Replies
    program: str
    place: Path | None = None
    may_run: bool = False
    timeout_s: float
    require: Callable[[CheckpointFiles], None] = lambda files: None
    signed: Callable[[Path], None] = lambda directory: None
    key: KeySource | None = None
    foreground: bool = False


def receive(source: Source, restore: Restore) -> Received:
    """Receive a stream and restore what it holds.

    Raises StreamError if it breaks off or is damaged, ImageError if the checkpoint in it is. What
    was received is gone then, unless the job may have ended at the sender's: the message names it.
    """
    with Signals() as signals:
        receiver = _Receiver(source, signals)
        try:
            receiver.take()
        except BaseException as exc:
            receiver.refuse(exc)
            receiver.close()
            raise
        if not source.foreground:
            return receiver.restore(restore)
    return receiver.restore(restore)


class _Receiver:
    """One stream."""

    def __init__(self, source: Source, signals: Signals) -> None:
        self._source = source
        self._signals = signals
        self._name = source.stream.place
        self._decoder = Decoder(self._fill, STREAM_MAGIC, self._name)
        self._contents = Contents(self._name)
        self._opening = Opening(source.key, source.replies, self._name)
        self._header = Header()
        self._count = 0
        self._unsynced = 0
        self._out = Path()
        self._held: DirectoryLock | None = None

    def take(self) -> None:
        """Everything up to the sender's word that the job has ended there."""
        above = self._prepare_place()  # what is wrong is said while nothing is frozen yet
        self._source.replies.tell(
            Kind.HELLO,
            self._signals.check,
            program=self._source.program,
            sealed=self._opening.has_key,
        )
        self._header = self._decoder.header()
        self._opening.begin(self._header.sealed)
        if self._header.left_running and not self._source.may_run:
            raise StreamError(
                f"{self._name} is of a job that was left running: it would run twice; "
                "--source-may-run restores it"
            )
        name = self._header.stream_id.hex()
        self._out = above / name if self._source.place is None else self._source.place.absolute()
        require_free(self._out)
        with new_directory(self._out) as part:
            digest = self._take_files(part)
            os.utime(part)  # for as long as nobody has the lock, it is too young to be swept
            fcntl.flock(int(part.name), fcntl.LOCK_SH)  # verify shares it with us
            self._held = share(part)  # to the end: others see that somebody still works on it
            with self._source.replies.steps("verifying", lambda: self._count):
                self._source.signed(part)
                self._source.require(self._opening.verify(part, self._on_progress))
            with self._source.replies.steps("syncing", lambda: self._count):
                self._sync(part)
        try:
            self._source.replies.tell(
                Kind.READY, self._signals.check, digest=digest.hex(), directory=str(self._out)
            )
            self._await_outcome()
        except BaseException as exc:
            self._after_ready(exc)
            raise

    def close(self) -> None:
        """Let go of what was received."""
        if self._held is not None:
            self._held.close()

    def refuse(self, exc: BaseException) -> None:
        """Tell the sender why nothing will be restored."""
        with suppress(StreamError):  # it is gone
            self._source.replies.tell(Kind.FAILED, message=str(exc))

    def restore(self, restore: Restore) -> Received:
        """What was taken; nothing stops this half-way."""
        try:
            # As long as criu lives: the job has ended elsewhere, and there is nothing to give up.
            with self._source.replies.steps("restoring", lambda: int(time.monotonic())):
                _wait_for_zombies(self._out)
                run = restore(self._out)
        except BaseException as exc:
            text = self._with_what_is_where(f"{exc}")
            self.refuse(StreamError(text))
            self.close()
            if isinstance(exc, CheckpointError):
                exc.args = (text,)
            raise
        kept = self._source.place is not None
        self._tell_restored(run)
        if not kept:
            try:
                spool.remove(self._out)
            except CheckpointError as exc:  # the job runs all the same
                log.warning("%s", exc)
        self.close()
        return Received(
            stream_id=self._header.stream_id,
            directory=self._out,
            kept=kept,
            files=self._contents.files,
            bytes=self._contents.total,
            run=run,
        )

    def _with_what_is_where(self, failure: str) -> str:
        """After a restore that failed."""
        stream = self._source.stream
        if stream.regular and self._source.place is None:
            text = f"{failure}; the checkpoint is still in {stream.place}"
            return spool.drop_but_log(self._out, "restore.log", text)
        here = f"{self._out}: `gpustasis restore -D {self._out}` restores it"
        if self._contents.outcome is Kind.RELEASED:
            what = f"the job has ended where it came from, and its checkpoint is in {here}"
        else:
            what = f"the checkpoint is in {here}, if it does not run where it came from"
        return f"{failure}; {what}"

    def _tell_restored(self, run: Run) -> None:
        kept = self._source.place is not None
        log_stays = kept or not run.log.is_relative_to(self._out)
        with suppress(StreamError):  # it runs, whoever knows
            self._source.replies.tell(
                Kind.RESTORED,
                pid=run.pid,
                criu_version=run.criu_version,
                seconds=run.seconds,
                log=str(run.log) if log_stays else "",
                directory=str(self._out) if kept else "",
                statistics=None if run.statistics is None else _totals(run.statistics),
            )

    def _prepare_place(self) -> Path:
        """The directory that what comes gets its place in."""
        place = self._source.place
        if place is None:
            spool.private_place(spool.RECEIVED)
            spool.sweep_received(spool.RECEIVED)
            return spool.RECEIVED
        require_free(place)
        above = place.absolute().parent
        if not os.access(above, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot make {place}: {above} is not there, or not writable")
        return above

    def _fill(self, space: memoryview) -> None:
        self._signals.check()  # also where there is never anything to wait for
        self._source.stream.fill(space, self._source.timeout_s, self._signals.check)

    # Files

    def _take_files(self, part: Path) -> bytes:
        """Until the end record; its hash."""
        while True:
            record = self._decoder.record()
            if record.kind is Kind.FILE:
                self._take_file(part, self._contents.file(record))
            elif record.kind is Kind.END:
                self._contents.end(record)
                return record.digest
            elif record.kind is Kind.DATA:
                self._contents.data(record)  # of no file: refused
            else:
                self._contents.other(record, self._header)
                if self._contents.outcome is Kind.ABANDONED:
                    raise StreamError(f"{self._name}: the sender gave up; the job runs on there")

    def _take_file(self, part: Path, entry: Entry) -> None:
        self._opening.require(entry.name)
        if entry.size > spool.free_bytes(part):
            raise StreamError(
                f"{self._out.parent} has {mib(spool.free_bytes(part))} free, and {entry.name} "
                f"needs {mib(entry.size)}"
            )
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(part / entry.name, flags, 0o600)
        try:
            while not self._contents.complete:
                record = self._decoder.record()
                if record.kind is Kind.DATA:
                    self._write(fd, self._contents.data(record))
                else:
                    self._contents.other(record, self._header)
                    if self._contents.outcome is not None:
                        raise StreamError(
                            f"{self._name}: the sender gave up; the job runs on there"
                        )
            os.fchmod(fd, entry.mode)
            os.fdatasync(fd)
            self._unsynced = 0
        finally:
            os.close(fd)
        with self._signals.at_once():  # a program that has the key may be waited for
            self._opening.took(part, entry.name)

    def _write(self, fd: int, data: memoryview) -> None:
        self._unsynced += len(data)
        while data:
            data = data[os.write(fd, data) :]
        if self._unsynced >= spool.SYNC_EVERY:
            os.fdatasync(fd)
            self._unsynced = 0

    def _on_progress(self, name: str, done: int, total: int) -> None:
        self._count += 1
        self._signals.check()

    def _sync(self, part: Path) -> None:
        """Files first; new_directory syncs the one above once they have their place."""
        for path in part.iterdir():
            self._signals.check()
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            self._count += 1
        fd = os.open(part, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # The outcome

    def _await_outcome(self) -> None:
        stream = self._source.stream
        while self._contents.outcome is None:
            if self._source.may_run and stream.is_at_end():
                return
            try:
                record = self._decoder.record()
            except StreamError as exc:
                raise StreamError(f"{exc}: it does not say that the job has ended") from exc
            self._contents.other(record, self._header)
        if self._contents.outcome is Kind.ABANDONED:
            raise StreamError(f"{self._name}: the sender gave up; the job runs on there")
        stream.require_end(self._source.timeout_s, self._signals.check)

    def _after_ready(self, exc: BaseException) -> None:
        """What was received is removed only if the sender says that the job runs on, or still has
        it: it may be all that is left of it."""
        if self._contents.outcome is Kind.ABANDONED or self._source.stream.regular:
            add_to(exc, spool.drop(self._out))
            return
        known = "the job has ended" if self._contents.outcome else "the job may have ended"
        add_to(
            exc,
            f"; {known} where it came from. Its checkpoint is in {self._out}: `gpustasis "
            f"restore -D {self._out}` restores it if it does not run there",
        )


def _totals(statistics: Statistics) -> dict[str, object]:
    """Of all processes: one record has no room for each of them."""
    return {
        "backend": statistics.backend,
        "processes": len(
            {task.pid for task in statistics.tasks} | {task.pid for task in statistics.cpu_memory}
        ),
        "staged_bytes": statistics.staged_bytes,
        "file_bytes": statistics.file_bytes,
        "cpu_bytes": sum(task.plain_bytes for task in statistics.cpu_memory),
    }


def _wait_for_zombies(images: Path) -> None:
    """Of the job itself, where it ran on this very machine: their pids are not free until whoever
    started them has waited for them. For a moment only: criu says it if one stays."""
    end = time.monotonic() + _ZOMBIES_S
    for task in read_pstree(images):
        while time.monotonic() < end and _is_zombie(task.pid):
            time.sleep(_POLL_S)


def _is_zombie(pid: int) -> bool:
    try:
        return (PROC / str(pid) / "stat").read_text(errors="replace").rpartition(") ")[2][0] == "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
