# SPDX-License-Identifier: Apache-2.0
"""A job's life under its supervisor: restored or started, and checkpointed when it is told to end.

Whatever goes wrong with a checkpoint, the job gets its SIGTERM, in time.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpustasis.errors import CheckpointError, VerificationError
from gpustasis.intervals import Schedule
from gpustasis.preemption import start
from gpustasis.preemption.making import Making, Settings
from gpustasis.preemption.records import Record
from gpustasis.preemption.signals import ENDING, Signals
from gpustasis.preemption.store import Found, JobStore, says_nothing
from gpustasis.preemption.streams import Outlet
from gpustasis.preemption.tree import end_job
from gpustasis.text import plural
from gpustasis.verifying import require_verified

_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
OUTPUT_S = 60.0  # waited for whoever reads what the job wrote last, when there is time
KILLED_S = 60.0  # waited for the end of a job that was killed
STOPPED_STATUS = 128 + ENDING  # told to end when nothing ran


class Supervisor:
    """say: told what happens, in sentences for people."""

    def __init__(
        self,
        settings: Settings,
        store: JobStore,
        signals: Signals,
        outlets: Sequence[Outlet],
        say: Callable[[str], None],
    ) -> None:
        self._settings = settings
        self._store = store
        self._signals = signals
        self._outlets = outlets
        self._say = say
        self._making = Making(settings, store, (outlets[0].number, outlets[1].number), say)
        self._schedule: Schedule | None = None  # None: no further checkpoint in between
        self._root: int | None = None  # of the job: a child that was not collected yet
        self._restoring = False  # what became of it is not known
        self._asked: float | None = None  # when this process was told to end, by time.monotonic()
        self._lost: dict[Path, str] = {}  # checkpoints that did not bring the job back: why not
        self._unverified: VerificationError | None = None  # of the last of these that was not
        self._made: Path | None = None
        self._because = "the job was told to end before it ran"

    def run(self) -> int:
        """The status to end with. Raises CheckpointError if the job cannot be started, or may not
        be started afresh."""
        try:
            root = self._begin()
            if root is None:
                return STOPPED_STATUS
            for outlet in self._outlets:
                outlet.give_away()
            self._because = ""
            return self._stay(root)
        finally:
            self._finish()

    def _finish(self) -> None:
        """A job that is still there, upon an error of ours, is told to end; the lock file goes on
        to name it, so that nobody starts it again beside itself."""
        if self._root is not None:
            with suppress(ProcessLookupError):
                os.kill(self._root, ENDING)
        end = self._end_of_output()
        for outlet in self._outlets:
            if not outlet.finish(max(end - time.monotonic(), 0)):
                self._say("the last that the job wrote is lost: nobody has read it in time")
        if self._root is None:
            self._making.clean()
        if self._root is None and not self._restoring:
            made = "" if self._made is None else str(self._made)
            try:
                self._store.tell(supervisor=os.getpid(), because=self._because, checkpoint=made)
            except CheckpointError as exc:
                self._say(str(exc))

    def _end_of_output(self) -> float:
        """Until when whoever reads what the job wrote is waited for."""
        now, spare = time.monotonic(), self._settings.reserve_s / 4
        if self._asked is None:
            return now + OUTPUT_S
        return max(now, self._asked + self._settings.grace_s - 2 * spare) + spare

    def _begin(self) -> int | None:
        """The root of the job; None: it was told to end before there was one."""
        for found in self._store.checkpoints(self._settings.identity):
            if self._signals.ending:
                return None
            if found.record is None:
                self._pass_over(found)
                continue
            try:
                root = self._restored(found.directory, found.record)
            except start.ToldToEnd:
                return None
            if root is not None and self._is_back(root, found.directory, found.record):
                return root
        if self._unverified is not None:
            raise self._unverified
        if self._lost and not self._settings.afresh:
            raise CheckpointError(
                f"none of the job's checkpoints can be restored, {next(iter(self._lost))} among "
                "them, and "
                "it may not be started afresh"
            )
        if self._signals.ending:
            return None
        return self._has_begun(start.start(self._settings.command, self._outlets), "starts afresh")

    def _pass_over(self, found: Found) -> None:
        """It cannot be used."""
        self._say(f"{found.directory} {found.unusable}")
        if not found.foreign:
            self._making.give_up(found.directory)
        if found.broken:
            self._lost[found.directory] = "could not be restored"
        if found.failed:
            self._making.discard(found.directory)

    def _restored(self, directory: Path, record: Record) -> int | None:
        """The root of the job, which runs; None: it cannot be restored, and nothing of it runs.
        Raises CheckpointError if nothing may be started, start.ToldToEnd."""
        try:
            start.verify(directory, lambda: self._signals.ending)
            self._store.tell_restoring(directory)
            self._restoring = True
            pid = start.restore(
                self._settings.criu, directory, record, self._outlets, self._making.words
            )
        except start.PidTakenError as exc:
            self._restoring = False
            raise CheckpointError(
                f"{directory} cannot be restored: {exc}; if that is the job itself, it would run "
                "twice"
            ) from exc
        except CheckpointError as exc:
            self._restoring = False
            if says_nothing(exc):
                raise
            self._lost[directory] = "could not be restored"
            self._say(f"{directory} cannot be restored: {exc}")
            self._making.give_up(directory)
            return None
        self._making.parent = directory
        return self._has_begun(pid, f"goes on, restored from {directory}")

    def _has_begun(self, root: int, how: str) -> int:
        self._root, self._restoring = root, False
        try:
            self._store.tell_root(root)
        except CheckpointError as exc:
            self._say(str(exc))
        self._say(f"process {root} {how}")
        return root

    def _is_back(self, root: int, directory: Path, record: Record) -> bool:
        """Whether the restored job counts as back; else it was killed. Told to end before that is
        known, it is checkpointed again. Raises VerificationError if no older one may be tried."""
        check = self._settings.check
        if check is None:
            return True
        if record.unverified:
            self._say(f"{directory} was not verified the last time: {record.unverified}")

        def look() -> None:
            if self._signals.ending:
                raise start.ToldToEnd

        facts = {"GPUSTASIS_ROOT_PID": str(root), "GPUSTASIS_CHECKPOINT": str(directory)}
        try:
            require_verified(check, facts, look)
        except start.ToldToEnd:
            self._lost[directory] = "was not verified yet"
            self._say(
                f"told to end while `{check}` was at work: it is not known whether it is back"
            )
            return True
        except VerificationError as exc:
            self._say(f"the job is not back: {exc}; it is killed, and {directory} stays")
            end_job(root, KILLED_S)
            self._root = None
            self._lost[directory] = "was not verified"
            self._making.parent = None
            self._mark(directory, replace(record, unverified=str(exc)))
            self._because = f"{directory} was restored, but is not back: {exc}"
            self._unverified = VerificationError(self._because)
            if not self._settings.older:
                raise self._unverified from exc
            return False
        if record.unverified:
            self._mark(directory, replace(record, unverified=""))
        self._say(f"process {root} is back: `{check}` has succeeded")
        return True

    def _mark(self, directory: Path, record: Record) -> None:
        try:
            record.write(directory)
        except OSError as exc:
            self._say(f"cannot note in {directory} whether it was verified: {exc.strerror}")

    def _stay(self, root: int) -> int:
        """Until the job has ended, or is in a checkpoint."""
        if self._settings.periodic is not None:
            self._schedule = Schedule(self._settings.periodic, time.monotonic())
        while True:
            self._signals.wait(None if self._schedule is None else self._schedule.left_s())
            status = _reap(root)
            if status is not None:
                self._root = None
                return self._ended(status)
            for number, moment in self._signals.take():
                if number == ENDING and self._asked is None:
                    self._asked = moment
                    made = self._checkpoint(root, moment)
                    if made is not None:
                        return made
                with suppress(ProcessLookupError):
                    os.kill(root, number)
            if self._schedule is not None and not self._schedule.left_s():
                self._go_on_from_here(root, self._schedule)

    def _go_on_from_here(self, root: int, schedule: Schedule) -> None:
        """A checkpoint is due. Told to end meanwhile, it has half of the time that there is."""
        try:
            made = self._making.periodic(root, lambda: self._signals.asked)
        except (CheckpointError, OSError) as exc:
            schedule.note(time.monotonic(), None)
            self._say(f"no checkpoint, the job runs on: {exc}")
            return
        schedule.note(time.monotonic(), made.downtime_s)
        self._say(f"the job is in {made.images} as well, and runs on")
        self._keep_last()

    def _ended(self, status: int) -> int:
        if not self._because:
            self._because = f"the job ended by itself, status {status}"
        told = self._asked is not None and self._settings.periodic is not None
        if status == 0 and not told:  # told to end, it may have more to do
            self._end()
        return status if status >= 0 else 128 - status

    def _end(self) -> None:
        try:
            self._store.end()
        except (CheckpointError, OSError) as exc:
            self._say(f"cannot note that the job ended well, its checkpoints are given up: {exc}")
            try:
                self._store.disown()
            except (CheckpointError, OSError) as again:
                self._say(f"checkpoints are left that the next start would restore: {again}")

    def _checkpoint(self, root: int, moment: float) -> int | None:
        """The status to end with; None: there is no checkpoint, and the job is to be told."""
        try:
            made = self._making.just_in_time(root, moment)
        except (CheckpointError, OSError) as exc:
            self._because = str(exc)
            self._say(f"no checkpoint, the job is told to end: {exc}")
            self._signals.forget(ENDING)  # they meant the checkpoint
            self._schedule = None
            return None
        # From here on the job is in the checkpoint: nothing that goes wrong changes that.
        self._made = made.images
        self._because = f"checkpointed in {made.record.seconds:.1f} s"
        _await_end(root)
        self._root = None
        with suppress(OSError):  # the expected time stands there then
            made.record.write(made.images)
        self._say(f"the job is in {made.images}, {made.record.seconds:.1f} s after the signal")
        self._keep_last()
        return self._settings.checkpointed_status

    def _keep_last(self) -> None:
        """After a success only, so that a failed one never removes a good one."""
        if self._lost:
            directory, why = next(iter(self._lost.items()))
            self._say(f"older checkpoints stay, for {directory} {why}")
            return
        try:
            removed = self._store.keep_last(self._settings.keep_last)
        except (CheckpointError, OSError) as exc:
            self._say(f"older checkpoints stay: {exc}")
        else:
            if removed:
                self._say(f"{plural(removed, 'older checkpoint')} removed")


def _reap(root: int) -> int | None:
    """Collect every child that has ended; the root's status, negative for a signal."""
    ended = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        if pid == root:
            ended = os.waitstatus_to_exitcode(status)


def _await_end(root: int) -> None:
    """criu has killed it: its end, and that of what it leaves to us, is a moment away."""
    with suppress(ChildProcessError):
        os.waitpid(root, 0)
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def become_subreaper() -> None:
    """What criu restores, and what the job leaves behind, comes to this process."""
    start.prctl(_PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
