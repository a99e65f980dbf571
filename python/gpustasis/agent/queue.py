# SPDX-License-Identifier: Apache-2.0
"""The one queue: what is asked for, by whom and in which order it is done, and what became of it.

Threads: whoever asks, and one for each checkpoint that is at work. One lock guards what they share;
nothing that may take long is done with it held.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from gpustasis.agent import containers, space
from gpustasis.agent.config import Config, Target
from gpustasis.agent.operations import GONE, INTERVAL, KEPT, Journal, Operation, State
from gpustasis.agent.space import Need, disk_used
from gpustasis.agent.subjects import Held, tree_pids
from gpustasis.agent.undrained import left_to_drain, total
from gpustasis.agent.work import REQUESTED, Work, is_in_memory
from gpustasis.errors import AgentError, CheckpointError
from gpustasis.image.arena import Tier
from gpustasis.text import mib

log = logging.getLogger(__name__)

_NOTHING = Need(0, 0)
_LOOK_S = 0.2
_ROOT = 0
# Told of each operation that has ended.
OnEnd = Callable[[Operation], None]


@dataclass(slots=True)
class _Job:
    """One that has not ended. claim: what it needs; None: not looked up yet. pids: of its tree,
    while it is at work."""

    work: Work
    pids: frozenset[int] = frozenset()
    claim: Need = field(default=_NOTHING)


class Queue:
    """Until close() is called. operations: all that are known, by id, oldest first."""

    def __init__(self, config: Config, journal: Journal, on_end: OnEnd) -> None:
        self._config = config
        self._journal = journal
        self._on_end = on_end
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiting: list[_Job] = []
        self._at_work: dict[str, _Job] = {}
        self._unsettled: dict[str, str] = {}
        self._closing = False
        self.operations: dict[str, Operation] = {}

    # Asked by others

    def submit(
        self, operation: Operation, process: Held | None = None, target: Target | None = None
    ) -> Operation:
        """Put it in the queue, which owns `process` from now on, whatever happens. Raises
        AgentError if it is refused."""
        work = Work(operation, self._config, target, process)
        work.write_down, work.not_over = self._journal.write, self.not_over
        job = _Job(work)
        try:
            with self._lock:
                self._require_room(operation)
                self._journal.write(operation)
                self.operations[operation.id] = operation
                self._waiting.append(job)
        except BaseException:
            _let_go(job)
            raise
        self._log("queued", operation)
        self._start_those_that_can()
        return operation

    def cancel(self, operation: Operation) -> str:
        """What was done about it, for a sentence. Raises AgentError if nothing can be."""
        with self._lock:
            for job in self._waiting:
                if job.work.operation is operation:
                    self._waiting.remove(job)
                    break
            else:
                job = None
            if job is None:
                if operation.state.is_over:
                    raise AgentError(f"operation {operation.id} is over: it is {operation.state}")
                at_work = self._at_work.get(operation.id)
                if at_work is None:
                    raise AgentError(
                        f"operation {operation.id} is not at work here: it ends just now, or an "
                        "agent before this one has begun it"
                    )
                if operation.state is State.QUEUED:  # until there is room for it
                    operation.cancel = True
                    self._changed.notify_all()
                    return "is cancelled: it had not begun"
                at_work.work.cancel()
                return "is told to let the job run on"
        self._end(job, State.CANCELLED, "")
        return "is cancelled: it had not begun"

    def pending(self, key: str) -> bool:
        """Whether a checkpoint of that subject waits or is at work, or one of an agent before this
        one is not settled."""
        with self._lock:
            jobs = [*self._waiting, *self._at_work.values()]
            if key in self._unsettled.values():
                return True
            return any(job.work.operation.subject.key == key for job in jobs)

    def counts(self) -> tuple[int, int]:
        """How many wait, and how many are at work."""
        with self._lock:
            return len(self._waiting), len(self._at_work)

    def known(self) -> list[Operation]:
        """All, oldest first, as they are now."""
        with self._lock:
            return list(self.operations.values())

    def add_known(self, operation: Operation) -> None:
        """One that an agent before this one has done, or begun: then settled() is called."""
        with self._lock:
            self.operations[operation.id] = operation
            if not operation.state.is_over:
                self._unsettled[operation.id] = operation.subject.key

    def settled(self, operation: Operation) -> None:
        """It is known what became of it, or nobody looks any more."""
        with self._lock:
            self._unsettled.pop(operation.id, None)

    def note_drained(self, place: Path, tier: Tier | None) -> None:
        """The checkpoint there is on the disk now; None: it is lost, or was given up."""
        stored = disk_used(place) if tier else 0
        with self._lock:
            for one in self.operations.values():
                if one.place == str(place) and one.figures is not None:
                    now = tier.value if tier else GONE
                    one.figures = replace(one.figures, tier=now, stored_bytes=stored)
                    break
            else:
                return
        try:
            self._journal.write(one)
        except AgentError as exc:
            log.warning("%s", exc)
        self._log("drained" if tier else "no longer in memory, and not drained", one)

    def last_done(self, like: Operation) -> Operation | None:
        """The last checkpoint of that subject that the same user has asked for, of the same target,
        since the node was started."""
        with self._lock:
            done = [
                one
                for one in self.operations.values()
                if one.state is State.DONE
                and (one.subject.key, one.target, one.uid, one.boot)
                == (like.subject.key, like.target, like.uid, like.boot)
            ]
        return max(done, key=lambda one: one.ended, default=None)

    def close(self, timeout_s: float) -> bool:
        """Begin nothing more, and wait for what is at work; whether it has ended. After half of
        the time checkpoints of engines that keep a container paused until somebody resumes it are
        cancelled: their containers run on then."""
        with self._lock:
            self._closing = True
            waiting, self._waiting = self._waiting, []
        for job in waiting:
            self._end(job, State.CANCELLED, "the agent was stopped before it began")
        with self._changed:
            if self._changed.wait_for(lambda: not self._at_work, timeout_s / 2):
                return True
            for job in self._at_work.values():
                if job.work.operation.subject.engine in containers.LEFT_PAUSED:
                    job.work.operation.cancel = True
            return self._changed.wait_for(lambda: not self._at_work, timeout_s / 2)

    # The queue itself

    def not_over(self) -> set[Path]:
        """Where the checkpoints are that have not ended."""
        return {Path(one.place) for one in self.known() if one.place and not one.state.is_over}

    def _require_room(self, operation: Operation) -> None:
        if self._closing:
            raise AgentError("the agent is about to stop")
        asked = [job.work.operation for job in self._waiting]
        asked = [one for one in asked if one.origin != INTERVAL]  # of which a target has only one
        # What users ask for keeps nobody else out.
        beside = sum((one.uid == _ROOT) == (operation.uid == _ROOT) for one in asked)
        if operation.origin != INTERVAL and beside >= self._config.queue:
            raise AgentError(f"the queue is full: {beside} wait already")
        own = sum(one.uid == operation.uid for one in asked)
        if operation.uid != _ROOT and own >= self._config.queue_per_user:
            raise AgentError(f"user {operation.uid} has {own} in the queue already")

    def _start_those_that_can(self) -> None:
        begun: list[_Job] = []
        with self._lock:
            full = len(self._at_work) >= self._config.concurrency
            waiting = [] if full else list(self._waiting)
        looked_up = [(job, _pids_of(job)) for job in waiting]
        with self._lock:
            for job, pids in looked_up:
                if len(self._at_work) >= self._config.concurrency:
                    break
                if job not in self._waiting:  # by another thread
                    continue
                job.pids = pids
                if not self._is_free(job):
                    continue
                self._waiting.remove(job)
                self._at_work[job.work.operation.id] = job
                begun.append(job)
        for job in begun:
            threading.Thread(target=self._work, args=(job,), daemon=True).start()

    def _is_free(self, job: _Job) -> bool:
        """Whether nothing of its tree is at work."""
        key = job.work.operation.subject.key
        return all(
            other.work.operation.subject.key != key and not other.pids & job.pids
            for other in self._at_work.values()
        )

    def _work(self, job: _Job) -> None:
        operation = job.work.operation
        try:
            if refused := self._claim(job):
                cancelled = operation.cancel
                self._end(job, State.CANCELLED if cancelled else State.REFUSED, refused)
                return
            job.work.prepare()
            self._journal.write(operation)
            self._log("begun", operation)
            job.work.last = self.last_done(operation)
            operation.figures = job.work.run()
        except CheckpointError as exc:
            job.work.discard()
            self._end(job, State.FAILED, str(exc))
        except Exception as exc:
            log.exception("operation %s", operation.id)
            self._end(job, State.FAILED, f"this is a bug in gpustasis: {exc!r}")
        else:
            self._end(job, State.DONE, "")

    def _claim(self, job: _Job) -> str:
        """Set aside what it needs, once there is room or nothing else is at work; why not."""
        operation = job.work.operation
        if job.work.process is None:
            pid = containers.root_pid(operation.subject, self._config)
            if pid is not None:
                job.pids = frozenset(tree_pids(pid))
        else:
            pid = operation.subject.pid
        last = self.last_done(operation)
        gpu = None if last is None or last.figures is None else last.figures.gpu_bytes
        arena: space.InArena = ""
        if is_in_memory(operation, self._config):
            arena = "gpu" if self._config.cpu_memory == "criu" else "all"
        need = _NOTHING if pid is None else space.estimate(pid, gpu, arena)
        if refused := self._why_over(operation, need.disk):
            return refused
        while True:
            left = left_to_drain(self.known())
            with self._changed:
                if operation.cancel or self._closing:
                    operation.cancel = True
                    return "it was cancelled before it began"
                others = [one for one in self._at_work.values() if one is not job]
                # Of a container the processes are known only now.
                free = not any(one.pids & job.pids for one in others if one.claim is not _NOTHING)
                claims = [one.claim for one in others]
                disk = sum(one.disk for one in claims) + total(self.operations.values(), left)
                claimed = Need(
                    sum(one.memory for one in claims), disk, sum(one.arena for one in claims)
                )
                why_not = space.why_not(need, claimed, self._config)
                if free and not why_not:
                    job.claim = need
                    own = (one for one in others if one.work.operation.uid == operation.uid)
                    beside = sum(one.claim.disk for one in own)
                    break
                if free and all(one is _NOTHING for one in claims):
                    return why_not
                self._changed.wait(_LOOK_S)
        # What has ended since counts twice: better than not at all.
        refused = self._why_over(operation, need.disk, beside)
        with self._changed:
            if refused:
                job.claim = _NOTHING
            else:
                operation.state, operation.began = State.RUNNING, time.time()
            self._changed.notify_all()
        return refused

    def _to_drain(self, uid: int) -> int:
        """Bytes, at most, that checkpoints in memory which this user has asked for, of no target,
        are still to take on the disk."""
        own = [one for one in self.known() if one.uid == uid and not one.target]
        return sum(left_to_drain(own).values())

    def _why_over(self, operation: Operation, disk: int, beside: int = 0) -> str:
        """Why one that takes so much is more than its user may have; "": it is not. beside: what
        those of the user that are at work may take."""
        if operation.uid == _ROOT:
            return ""
        # First: what is drained in between counts twice, which is better than not at all.
        beside += self._to_drain(operation.uid)
        used = disk_used(self._config.store / REQUESTED / str(operation.uid)) + beside
        if used + disk <= self._config.disk_per_user:
            return ""
        return (
            f"user {operation.uid} has {mib(used)} of checkpoints, this one needs up to "
            f"{mib(disk)} more, and disk_per_user is {mib(self._config.disk_per_user)}"
        )

    def _end(self, job: _Job, state: State, error: str) -> None:
        operation = job.work.operation
        operation.error, operation.ended = error, time.time()
        operation.state = state
        _let_go(job)
        try:
            self._journal.write(operation)
        except AgentError as exc:
            log.warning("%s", exc)
        self._log("ended", operation)
        with self._changed:
            self._at_work.pop(operation.id, None)
            self._forget_old(operation.uid)
            self._changed.notify_all()
        self._on_end(operation)
        self._start_those_that_can()

    def _forget_old(self, uid: int) -> None:
        """All but the last that this user has asked for; and never the last checkpoint of a target,
        which the next one is due after. With the lock held."""
        over = [one for one in self.operations.values() if one.uid == uid and one.state.is_over]
        last: dict[str, Operation] = {}
        for one in over:
            if one.state is State.DONE and one.target:
                last[one.target] = max(one, last.get(one.target, one), key=lambda each: each.ended)
        kept = {one.id for one in last.values()}
        for one in over[: max(0, len(over) - KEPT)]:
            if one.id not in kept:
                del self.operations[one.id]
                self._journal.forget(one)

    def _log(self, what: str, operation: Operation) -> None:
        level = logging.WARNING if operation.error else logging.INFO
        log.log(level, "operation %s", what, extra={"operation": operation.as_json()})


def _pids_of(job: _Job) -> frozenset[int]:
    process = job.work.process
    if process is None:
        return frozenset()
    try:
        return frozenset(tree_pids(process.pid))
    except AgentError:  # it is refused before it begins
        return frozenset((process.pid,))


def _let_go(job: _Job) -> None:
    process, job.work.process = job.work.process, None
    if process is not None:
        with suppress(OSError):
            process.close()
