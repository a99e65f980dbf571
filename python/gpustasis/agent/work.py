# SPDX-License-Identifier: Apache-2.0
"""One checkpoint, from its begin to its end; in a thread of its own."""

from __future__ import annotations

import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import gpustasis
from gpustasis.agent import containers, criu_alone
from gpustasis.agent.config import Config, Target
from gpustasis.agent.in_memory import is_broken_off, why_not_given_up
from gpustasis.agent.measured import figures_of
from gpustasis.agent.operations import Figures, Operation
from gpustasis.agent.subjects import Held, require_all_of, require_not_ours, tree_pids
from gpustasis.answering import ANSWER_S, TimedOutError, answer_within
from gpustasis.criu.run import Run
from gpustasis.draining.drain import can_be_drained
from gpustasis.dump_records import alone_with, find_begun, find_dropped
from gpustasis.errors import AgentError, CheckpointError
from gpustasis.files import open_own_directory
from gpustasis.image.arena import Tier
from gpustasis.image.directory import share, try_exclude
from gpustasis.image.store import read_entry, read_store
from gpustasis.image.verification import is_of_criu_alone, verify_directory
from gpustasis.jobs.cuda import load_driver
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.streaming.dumping import TICK_S, Dumping
from gpustasis.task import find_users, has_driver_thread, misleading_thread, read_task

log = logging.getLogger(__name__)

CRIU = ("criu", "ld-linux-x86-64")  # by its name, or that of the loader of its root
_LOGS = "*.log"  # CRIU's
_END_S = 60.0  # for criu to end a job that it was told to end
_REFILL_S = 30.0  # for the plugin to put memory back
_ASK_S = 20.0  # for the driver to say of all processes of a tree who runs
_MOST_NAMED = 64
_MOST_RUNNING = 1024  # of the processes of a tree, so that the record can be read again
REQUESTED, TARGETS = "users", "targets"  # directories of the store


@dataclass(slots=True)
class Work:
    """What the thread needs. process: held since it was asked for; None: it is a container. last:
    the last checkpoint of the same process that was made. write_down: puts the operation on the
    disk, or raises AgentError. not_over: where those are that have not ended. told: criu is told to
    end the job: there is no way back. made: the dump has come to its end. lock: of `told` and
    operation.cancel."""

    operation: Operation
    config: Config
    target: Target | None
    process: Held | None = None
    last: Operation | None = None
    write_down: Callable[[Operation], None] = lambda _: None
    not_over: Callable[[], Collection[Path]] = tuple
    told: bool = False
    made: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)

    def cancel(self) -> None:
        """While it is at work. Raises AgentError if that is too late, or nothing can be done."""
        operation = self.operation
        if operation.subject.engine == "podman":
            raise AgentError(
                f"operation {operation.id} is at work, and Podman's service cannot be told to give "
                "up: it ends by itself"
            )
        if not operation.stop and not operation.subject.engine:
            raise AgentError(
                f"operation {operation.id} is at work, and leaves {operation.subject} running: it "
                "ends by itself"
            )
        with self.lock:
            if self.told:
                raise AgentError(
                    f"operation {operation.id} cannot be cancelled: its checkpoint is complete, "
                    f"and criu is told to end {operation.subject}"
                )
            operation.cancel = True

    def prepare(self) -> None:
        """Say where it will be, so that this can be written down before anything is done there.
        Raises AgentError."""
        directory = self._directory()
        _make(self.config.store, directory)
        name = f"{datetime.now(UTC):%Y%m%dT%H%M%S.%f}-{self.operation.id}"
        self.operation.place = str(directory / (name if self.process else f"{name}.tar"))

    def run(self) -> Figures:
        """Make the checkpoint. Raises CheckpointError: then the job runs on, but for what the error
        or operation.note says."""
        begin = time.monotonic()
        place = Path(self.operation.place)
        if self.process is not None:
            figures = self._process(self.process, place, begin)
            self._tidy(place.parent)
            return figures
        figures = containers.checkpoint(self.operation, self.config, place, begin, self.write_down)
        if self.target is not None:
            containers.keep_last(place, self.target.keep_last)
        return figures

    def _directory(self) -> Path:
        """Where checkpoints of this job lie, beside each other."""
        operation = self.operation
        if self.target is not None:
            return self.config.store / TARGETS / self.target.name
        subject = operation.subject
        name = f"{subject.engine or 'process'}-{subject.name.replace('/', '_') or subject.key}"
        return self.config.store / REQUESTED / str(operation.uid) / name

    def _process(self, process: Held, images: Path, begin: float) -> Figures:
        process.require_alive(process.pid)
        require_not_ours(process.pid)
        if self.operation.uid != 0:
            require_all_of(process.pid, self.operation.uid)
        parent = self._parent()
        images.mkdir(0o700)
        chain = 0 if self.target is None else self.target.max_chain
        in_memory = is_in_memory(self.operation, self.config)
        self._note_running(process.pid)

        def dump(place: Path, words: Sequence[str]) -> Run:
            made = gpustasis.checkpoint(
                process.pid,
                place,
                parent=parent,
                whole=parent is None,
                max_chain=chain if parent is not None else None,
                leave_running=not self.operation.stop,
                cpu_memory=self.config.cpu_memory,
                layout="criu" if in_memory else "packed",
                tier="ram" if in_memory else "disk",
                criu=self.config.criu,
                criu_args=tuple(words),
            )
            assert made.dump is not None
            return made.dump

        if self.operation.stop:
            done = self._ending(process, images, dump)
        else:
            done = dump(images, ())
            try:
                # Whatever has its pid by now may be what was dumped.
                process.require_alive(process.pid)
                if self.operation.uid != 0:  # one may have joined it that is not the user's
                    require_all_of(process.pid, self.operation.uid)
            except AgentError as exc:
                left = "" if remove_failed(images) else f", but for what is in use in {images}"
                raise AgentError(f"while it was dumped: {exc}; it was removed{left}") from exc
        self.made = True
        if in_memory:
            _sync_what_is_not(images)
        verified = self._verify(images)
        return figures_of(done, images, time.monotonic() - begin, parent is not None, verified)

    def _note_running(self, pid: int) -> None:
        """Write down who runs, for the agent that comes after one that was killed together with its
        criu: what is locked then, this dump has locked. Who does not answer is left out."""
        found, silent = [], []
        deadline = time.monotonic() + _ASK_S
        for one in tree_pids(pid):
            try:
                task = read_task(one)
                # A stopped one answers nothing, and the plugin refuses it.
                if task.state in "tT" or not has_driver_thread(one):
                    continue
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    silent.append(one)
                elif driver_state(one, min(left_s, ANSWER_S)) == "running":
                    found.append((one, task.start_time))
            except TimedOutError:
                silent.append(one)
            except CheckpointError:
                continue
        if silent:
            log.warning(
                "operation %s: the driver has not said within %g s whether these processes run; if "
                "this agent and criu are killed, they may stay locked: %s",
                *(self.operation.id, _ASK_S, " ".join(map(str, silent[:_MOST_NAMED]))),
            )
        self.operation.running = found[:_MOST_RUNNING]
        self.write_down(self.operation)

    def _ending(
        self, process: Held, images: Path, dump: Callable[[Path, Sequence[str]], Run]
    ) -> Run:
        """A dump that ends the job, once it is complete and it is seen that it is of this process:
        if the agent dies before, the job runs on."""
        with tempfile.TemporaryDirectory(prefix="gpustasis-agent-") as private:
            dumping = Dumping(dump, process.pid, images, Path(private), _END_S, keep=False)
            try:
                dumping.start()
                while not dumping.is_over() and not dumping.is_complete():
                    time.sleep(TICK_S)
                if not dumping.is_over():
                    dumping.end_job(lambda: self._still_wanted(process), lambda: None)
                dumping.require_dumped()
            except CheckpointError as exc:
                fate = dumping.fate()
                self.operation.note = fate.wrong or f"the job runs on: {fate.runs}"
                raise AgentError(f"{exc}; {self.operation.note}") from exc
            finally:
                dumping.close()
        assert dumping.done is not None
        return dumping.done

    def _still_wanted(self, process: Held) -> None:
        """While the tree stands, all of it dumped."""
        process.require_alive(process.pid)
        if self.operation.uid != 0:
            require_all_of(process.pid, self.operation.uid)
        with self.lock:
            if self.operation.cancel:
                raise AgentError("it was cancelled")
            self.told = True

    def _parent(self) -> Path | None:
        """The last checkpoint of the same process, if it is still there, and whole. Only one in the
        same directory: there it is kept for as long as one that is built on it. Not one that can
        never be drained: what is built on that cannot be, either. Nor is a checkpoint on the disk
        built on one in memory."""
        if self.target is None or not self.target.max_chain or self.last is None:
            return None
        place = Path(self.last.place)
        if place.parent != self._directory():
            return None
        entry = read_entry(place)
        if entry.incomplete:
            return None
        if entry.tier is Tier.DURABLE:
            return place
        fits = is_in_memory(self.operation, self.config) and can_be_drained(place)
        return place if fits else None

    def _verify(self, images: Path) -> bool:
        if self.target is None or not self.target.verify:
            return False
        return require_whole(images, keep=self.operation.stop)

    def discard(self) -> None:
        """After a failure: remove what it has written, but for CRIU's log, if nobody needs it: it
        would count as the user's, and fill the disk. What failed before goes with its log."""
        images, process = Path(self.operation.place), self.process
        # One that was made has failed its check: what is damaged was removed there.
        if process is None or self.made or not images.is_dir():
            return
        alive = process.is_alive()
        if self.operation.stop and not alive:
            return  # what is right in it may be of use
        try:
            entry = read_entry(images)
            if entry.unread or not entry.incomplete:
                return
            if not alive or not any(map(needs_recovery, tree_pids(process.pid))):
                remove_failed(images, keep_log=True)
            self._remove_others(images.parent, _is_stripped)
        except (CheckpointError, OSError) as exc:
            log.warning("%s stays, of a checkpoint that has failed: %s", images, exc)

    def _tidy(self, directory: Path) -> None:
        """After a success: remove what is older than the last ones, by prune's rules, and what
        failed. Never what was just made: by its time it may be the oldest, as a clock is set."""
        try:
            with share(Path(self.operation.place)):
                self._remove_old(directory)
            self._remove_others(directory)
        except (CheckpointError, OSError) as exc:
            log.warning("old checkpoints in %s stay: %s", directory, exc)

    def _remove_old(self, directory: Path) -> None:
        keep = self.config.keep_last if self.target is None else self.target.keep_last
        at_work = {*self.not_over()} - {Path(self.operation.place)}
        try:
            keep = criu_alone.put_old_aside(
                directory, keep, at_work, lambda place: find_users(place, *CRIU)
            )
        except (CheckpointError, OSError) as exc:
            log.warning("old checkpoints of CRIU alone in %s stay: %s", directory, exc)
        gpustasis.prune(directory, keep_last=keep)

    def _remove_others(
        self, directory: Path, which: Callable[[Path], bool] = lambda _: True
    ) -> None:
        """What was broken off. which: whether that one."""
        for entry in read_store(directory).values():
            if not entry.incomplete or entry.directory in self.not_over():
                continue
            # Of one that has ended since it was looked at, what counts is how it is now.
            if which(entry.directory) and is_broken_off(read_entry(entry.directory)):
                remove_failed(entry.directory, at_once=True)


def is_in_memory(operation: Operation, config: Config) -> bool:
    """Whether its checkpoint goes into memory first. Of a job that ends with it nothing else is
    left: that one goes to the disk."""
    return config.tier == "ram" and not operation.subject.engine and not operation.stop


def _make(store: Path, directory: Path) -> None:
    levels = len(directory.relative_to(store).parts) + 1
    try:
        os.close(open_own_directory(str(directory), levels, 0o700))
    except OSError as exc:
        raise AgentError(f"cannot use {exc.filename or directory}: {exc.strerror or exc}") from exc


def needs_recovery(pid: int) -> bool:
    """Whether the memory of its GPUs may be in a checkpoint alone."""
    return find_dropped(pid) is not None or find_begun(pid) is not None


def _is_stripped(directory: Path) -> bool:
    """Whether only logs are left there."""
    return set(directory.iterdir()) == set(directory.glob(_LOGS))


def driver_state(pid: int, seconds: float = ANSWER_S) -> str:
    """What the driver says of a process. Raises CheckpointError if it does not tell, or a dump of
    it is under way; TimedOutError after so many seconds."""
    if misled := misleading_thread(pid):
        raise CheckpointError(f"{misled}; the driver is not asked about it")
    with alone_with(pid, "gpustasis agent"):
        ask = partial(load_driver().get_state, pid)
        return answer_within(seconds, f"GetState on process {pid}", ask).name.lower()


def require_whole(images: Path, *, keep: bool) -> bool:
    """Read all of a checkpoint, and raise AgentError unless it is whole. A damaged one is removed:
    it must not count as one of the last that are kept. What cannot be read now stays: it may be
    right, and in memory alone. keep: so does the only one of a job that has ended: what is right in
    it may be of use. Whether it was read: nothing tells what is right where CRIU has all."""
    damage: list[str] = []
    try:
        if is_of_criu_alone(images):
            return False
        problems = verify_directory(images).problems
        if problems:  # once more: it may be the only copy, and a medium may answer wrongly once
            verify_directory(images, damage=damage)
    except (CheckpointError, OSError, MemoryError) as exc:
        problems = [str(exc) or repr(exc)]
    if damage:
        left = "it was removed" if not keep and remove_failed(images) else "it was left there"
        raise AgentError(f"the checkpoint in {images} is damaged: {damage[0]}; {left}")
    if problems:
        raise AgentError(
            f"whether the checkpoint in {images} is whole cannot be told: {problems[0]}; it was "
            "left there"
        )
    return True


def _sync_what_is_not(images: Path) -> None:
    """Of what was to go into memory first, and has nothing there: CRIU has all, and nobody drains
    it. Raises AgentError."""
    try:
        if is_of_criu_alone(images):
            criu_alone.bring_to_disk(images)
    except OSError as exc:
        left = "it was removed" if remove_failed(images) else "it was left there"
        raise AgentError(f"the checkpoint in {images} cannot be synced: {exc}; {left}") from exc


def remove_failed(directory: Path, *, keep_log: bool = False, at_once: bool = False) -> bool:
    """Remove what a failed dump has left, in memory too, unless it is in use: memory may still be
    put back from it. at_once: nobody waits for that. Whether it is gone."""
    deadline = time.monotonic() + (0 if at_once else _REFILL_S)
    while find_users(directory, *CRIU, WORKER_COMM, GUARDIAN_COMM):
        if time.monotonic() > deadline:
            return False
        time.sleep(TICK_S)
    # First: without the directory nobody would know any more whose the memory is.
    while why_not := why_not_given_up(directory):
        if time.monotonic() > deadline:
            log.warning("%s stays: %s", directory, why_not)
            return False
        time.sleep(TICK_S)
    lock = try_exclude(directory)
    if lock is None:
        return False
    with lock:
        if keep_log:
            for one in set(directory.iterdir()) - set(directory.glob(_LOGS)):
                shutil.rmtree(one) if one.is_dir() and not one.is_symlink() else one.unlink()
        if not keep_log or not any(directory.iterdir()):
            shutil.rmtree(directory, ignore_errors=True)
    return not directory.exists()
