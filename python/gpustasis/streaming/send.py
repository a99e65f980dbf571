# SPDX-License-Identifier: Apache-2.0
"""Dump a job into a spool, and send what is there while the dump goes on.

Two phases: until the receiver has all of it, checked and on its disk, the tasks stand where the
dump left them, and whatever goes wrong lets them run on. Only then may criu kill them, and only
when each of them has ended the receiver is told that it may restore.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from gpustasis._core import ENVELOPE_NAME, PARENT_LINK
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.criu.run import Run
from gpustasis.errors import CheckpointError, StreamError, add_to
from gpustasis.files import open_regular, sync_directory
from gpustasis.streaming import sealed, spool
from gpustasis.streaming.answers import Answers
from gpustasis.streaming.channel import Descriptor
from gpustasis.streaming.dumping import TICK_S, Dump, Dumping, Fate
from gpustasis.streaming.records import SEALED, STREAM_MAGIC, Encoder, Entry, Header, Kind
from gpustasis.streaming.signals import Signals
from gpustasis.task import read_task

log = logging.getLogger(__name__)

DEFAULT_TIMEOUT_S = 600.0
DEFAULT_RESTORE_TIMEOUT_S = 3600.0
_PROGRESS_S = 2.0
_ABANDON_S = 5.0
_NOT_SENT = re.compile(r".*\.log|gpustasis-(dump|restore|undo)\.(json|log)|stats-.*")


@dataclass(slots=True, kw_only=True)
class Sent:
    """What was sent. bytes: of the files. images: where it was dumped; spool: where it still is;
    None: nowhere. restored: what the receiver says of its restore; None: nobody answers.
    dump: None: criu has ended the job, and then failed. seconds: from the start to the outcome.
    """

    stream_id: bytes
    images: Path
    files: int = 0
    bytes: int = 0
    spool: Path | None = None
    restored: dict[str, Any] | None = None
    dump: Run | None = None
    seconds: float = 0.0


@dataclass(slots=True, kw_only=True)
class Target:
    """Where a stream goes. answers: None: nobody answers. name_file: of a file: called when all but
    the outcome is written and synced, gives it its name; discard removes it again. timeout_s: how
    long it may stall. restore_timeout_s: how long whoever answers may restore."""

    out: Descriptor
    answers: Answers | None = None
    name_file: Callable[[], None] | None = None
    discard: Callable[[], None] = lambda: None
    timeout_s: float = DEFAULT_TIMEOUT_S
    restore_timeout_s: float = DEFAULT_RESTORE_TIMEOUT_S


def is_sent(path: Path) -> bool:
    """Whether that file of an image directory is part of the checkpoint."""
    return not _NOT_SENT.fullmatch(path.name)


def send_file(
    path: Path, encoder: Encoder, write: Callable[[memoryview | bytes], None], sent: Sent
) -> os.stat_result:
    """One file, counted in `sent`; what it was. Raises StreamError."""
    with open_regular(path, os.O_NOFOLLOW) as file:
        found = os.fstat(file.fileno())
        entry = Entry(name=path.name, mode=found.st_mode & 0o777, size=found.st_size)
        write(encoder.file(entry))
        left = entry.size
        while left:
            count = os.readv(file.fileno(), [encoder.space[:left]])
            if count == 0:
                raise StreamError(f"{path} became shorter while it was sent")
            write(encoder.record(Kind.DATA, count))
            left -= count
    sent.files += 1
    sent.bytes += entry.size
    return found


def send(
    dump: Dump,
    pid: int,
    target: Target,
    *,
    leave_running: bool = False,
    is_sealed: bool = False,
    place: Path | None = None,
) -> Sent:
    """Dump the tree below `pid` and send it. is_sealed: the dump seals it. place: of the spool;
    None: the usual one.

    Raises StreamError if the stream broke off; CriuError if the dump failed. What became of the
    job stands in the message: that it runs on only if each of its tasks was seen alive.
    """
    with Signals() as signals:
        read_task(pid)
        if target.answers is not None:
            try:
                target.answers.hello(signals.check)
                if is_sealed:
                    sealed.require_opened(target.answers)
            except StreamError as exc:
                exc.args = (f"{exc}; nothing was frozen: the job was not touched",)
                raise
        with (
            spool.spool_for(pid, place) as images,
            tempfile.TemporaryDirectory(prefix="gpustasis-") as private,
        ):
            try:
                dumping = Dumping(dump, pid, images, Path(private), target.timeout_s, leave_running)
            except BaseException as exc:
                add_to(exc, spool.drop(images))
                raise
            try:
                return _Sender(dumping, target, images, signals, leave_running, is_sealed).run()
            finally:
                dumping.close()


@dataclass(slots=True)
class _Sender:
    """One stream. ready: it is safe at the other end. released: the receiver may have been told to
    restore."""

    dumping: Dumping
    target: Target
    images: Path
    signals: Signals
    leave_running: bool
    is_sealed: bool
    ready: bool = False
    released: bool = False
    encoder: Encoder = field(init=False)
    sent: Sent = field(init=False)
    _files: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _written: float = 0.0
    _begin: float = field(default_factory=time.monotonic)
    _unsynced: int = 0
    _keep: bool = False
    _ended: bool = False

    def __post_init__(self) -> None:
        self.sent = Sent(stream_id=secrets.token_bytes(16), images=self.images)
        answered = self.target.answers is not None
        self.encoder = Encoder(
            STREAM_MAGIC,
            Header(
                stream_id=self.sent.stream_id,
                answered=answered,
                left_running=self.leave_running,
                required_features=SEALED if self.is_sealed else 0,
            ),
        )

    def run(self) -> Sent:
        """See send."""
        try:
            self._write(self.encoder.header)
            self.dumping.start()
            self._send_while_dumping()
            self._send_rest()
            if self.leave_running:
                self._write(self.encoder.record(Kind.LEFT_RUNNING))
                if self.target.name_file is not None:
                    self._name_file()
            else:
                self._wait_until_ready()
                self.dumping.end_job(self._check, self._idle)
                self.signals.forget()  # from here on there is a wait that a new one can end
                self.released = True
                self._write(self.encoder.record(Kind.RELEASED))
        except BaseException as exc:  # noqa: BLE001 - the job must run on, whatever it was
            self._give_up(exc)
        self._finish()
        return self.sent

    def _send_while_dumping(self) -> None:
        while not self.dumping.is_over() and not self.dumping.is_complete():
            for path in sealed.next_files(self.images.iterdir(), self.is_sealed):
                self._send_file(path)
            self._idle()
            time.sleep(TICK_S)
        if self.dumping.is_over():
            self.dumping.require_dumped()

    # The stream

    def _check(self) -> None:
        """Called whenever there is something to wait for."""
        if self.dumping.committed:
            return  # no signal stops it half-way
        self.signals.check()
        if self.dumping.is_over():
            self.dumping.require_dumped()
        if self.target.answers is not None:
            self.target.answers.check()

    def _idle(self) -> None:
        self._check()
        if self.target.out.regular or time.monotonic() < self._written + _PROGRESS_S:
            return
        # A link that breaks once the job is being ended is found out when that is done.
        with suppress(StreamError) if self.dumping.committed else nullcontext():
            self._write(self.encoder.record(Kind.PROGRESS))

    def _write(self, data: memoryview | bytes) -> None:
        self._check()
        answers = self.target.answers
        heard = (lambda: 0.0) if answers is None else answers.last_progress
        self.target.out.write(data, self.target.timeout_s, self._check, heard)
        self._written = time.monotonic()
        self._unsynced += len(data)
        if self.target.out.regular and self._unsynced > spool.SYNC_EVERY:
            os.fdatasync(self.target.out.fd)
            self._unsynced = 0

    def _send_file(self, path: Path) -> None:
        if path.name in self._files:
            return
        sealed.require_fit(path.name, self.is_sealed)
        self._files[path.name] = identity_of(send_file(path, self.encoder, self._write, self.sent))

    def _send_rest(self) -> None:
        """What criu has written: complete by now."""
        if os.path.lexists(self.images / PARENT_LINK):
            raise StreamError("the dump was built on an earlier checkpoint, which no stream holds")
        paths = [path for path in self.images.iterdir() if is_sent(path)]
        if self.is_sealed and not os.path.lexists(self.images / ENVELOPE_NAME):
            raise StreamError("the dump was to be sealed, and is not")
        for path in sealed.in_order(paths):
            self._send_file(path)
        for path in paths:
            if identity_of(path.lstat()) != self._files[path.name]:
                raise StreamError(f"{path} was changed after it was sent")
        if INVENTORY_NAME not in self._files:
            raise StreamError(f"the dump wrote no {INVENTORY_NAME}")
        self._ended = True
        self._write(self.encoder.end(self.sent.files, self.sent.bytes))

    # Two phases

    def _wait_until_ready(self) -> None:
        """Until what was sent is somewhere to stay, whatever happens here."""
        digest = self.encoder.digest.hex()
        answers = self.target.answers
        if answers is not None:
            if answers.expect(Kind.READY, self._idle).get("digest") != digest:
                raise StreamError(f"{answers.place} has received something else than was sent")
            self.ready = True
        elif self.target.name_file is not None:
            self._name_file()
        else:
            self._keep_spool()

    def _name_file(self) -> None:
        assert self.target.name_file is not None
        try:
            os.fsync(self.target.out.fd)
            self.target.name_file()
        except OSError as exc:
            raise StreamError(f"cannot write {self.target.out.place}: {exc.strerror}") from exc
        self.ready = True

    def _keep_spool(self) -> None:
        """Nobody says whether the stream arrives: then the spool is the checkpoint."""
        for name in self._files:
            self._check()
            with open_regular(self.images / name) as file:
                os.fsync(file.fileno())
        sync_directory(self.images)
        sync_directory(self.images.parent)

    def _finish(self) -> None:
        """After the outcome: only the spool is left to decide about."""
        target = self.target
        self.sent.dump = self.dumping.done
        self.sent.seconds = time.monotonic() - self._begin
        try:
            if target.out.regular and self.released:
                os.fsync(target.out.fd)
            target.out.end_writing()
            if target.answers is not None:
                self.sent.restored = target.answers.expect(
                    Kind.RESTORED, self.signals.check, target.restore_timeout_s
                )
        except (StreamError, OSError) as exc:
            raise StreamError(f"{exc}; {self._has_ended()}") from exc
        if target.answers is None and target.name_file is None and not self.leave_running:
            self.sent.spool = self.images
        else:
            try:
                spool.remove(self.images)
            except CheckpointError as exc:  # all the rest is done
                log.warning("%s", exc)
                self.sent.spool = self.images

    def _give_up(self, error: BaseException) -> NoReturn:
        """Have the job run on, see that it does, and raise `error` with what became of it."""
        fate = Fate() if self.released else self.dumping.fate()
        if isinstance(error, StreamError) and self.target.answers is not None:
            error = self.target.answers.last_words() or error
        text = f"{error}; {self._what_became(fate)}"
        if not self._keep:  # a job that runs on
            text = spool.drop_but_log(self.images, "dump.log", text)
        self.target.out.close()
        if isinstance(error, CheckpointError):
            error.args = (text,)
            raise error
        raise StreamError(text) from error

    def _what_became(self, fate: Fate) -> str:
        if self.released:
            self._keep = True
            return self._has_ended()
        wrong = fate.wrong
        if not (wrong and self.ready):
            self.target.discard()
        if not wrong:
            self._abandon()
            return f"the job runs on: {fate.runs}{self._left_there()}"
        self._keep = True
        if (self.images / INVENTORY_NAME).exists():
            return (
                f"the job may have ended: {wrong}. Its checkpoint is in {self.images}: `gpustasis "
                f"restore -D {self.images}` restores it if it runs neither here nor there"
            )
        return f"it cannot be said that the job runs on: {wrong}; what was dumped: {self.images}"

    def _left_there(self) -> str:
        """A receiver removes what it has when it is told that the job runs on; one that was killed
        cannot."""
        answers = self.target.answers
        if answers is None or not answers.received:
            return ""
        return (
            f". If {answers.place} was killed, what it received is still there, in "
            f"{answers.received}: remove that, the job must not run twice"
        )

    def _has_ended(self) -> str:
        text = (
            f"the job has ended here. Its checkpoint is in {self.images}: `gpustasis restore -D "
            f"{self.images}` restores it, if it does not run at the receiver's"
        )
        answers = self.target.answers
        if answers is not None and answers.received:
            text += (
                f". If it does not, {answers.place} has it as well, in {answers.received}: restore "
                "one of the two"
            )
        return text

    def _abandon(self) -> None:
        """Only once the job was seen alive: what was received is removed then. Before its end the
        stream just breaks off."""
        if not self._ended:
            return
        record = self.encoder.record(Kind.ABANDONED)
        with suppress(StreamError):  # it finds out by the end of the stream
            self.target.out.write(record, _ABANDON_S, lambda: None)


def identity_of(found: os.stat_result) -> tuple[int, ...]:
    """Of a file that has changed it is another."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
