# SPDX-License-Identifier: Apache-2.0
"""A rank that lives in a container: its engine starts criu, and criu's action script asks here
before each step (docs/jobs.md, Containers). The phases are those of every rank."""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from gpustasis.errors import CheckpointError, JobError
from gpustasis.files import remove
from gpustasis.jobs import communicators, epochs
from gpustasis.jobs.checkpointing import Checkpointing
from gpustasis.jobs.cuda import cuda_processes, require_unlocked, unlock_tree
from gpustasis.jobs.dumps import DumpRecord, record_of, require_same
from gpustasis.jobs.network import Lock, look, own_addresses
from gpustasis.jobs.rank import Context, HasCriu
from gpustasis.jobs.visits import EnginesCriu, Visit, Visits
from gpustasis.jobs.work import Order
from gpustasis.streaming.tree import Tree

log = logging.getLogger(__name__)

PRE_DUMP, POST_DUMP = "pre-dump", "post-dump"
POST_RESTORE, PRE_RESUME = "post-restore", "pre-resume"
FIRST = (PRE_DUMP, POST_RESTORE)  # actions before which nothing of an epoch was done
_ENDED_S = 60.0
_RESUMED_S = 5.0  # for an engine whose criu has just failed, to end its pause
_POLL_S = 0.05


class Pause(Protocol):
    """That of an engine, which pauses a container before it has it dumped. Methods raise
    CheckpointError."""

    def lift(self) -> None:
        """The tasks run, if they did before the engine was asked."""

    def put_back(self) -> None:
        """As the engine has left them."""

    def is_on(self) -> bool: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """What a rank needs of its container's. ask: has it dump the container, and returns when it
    has; what it raises is why it has not. pause: of a container. marks: the policy directory, in
    which the plugin leaves a mark for a container that ends."""

    ask: Callable[[Order, Callable[[], bool]], None]
    pause: Callable[[str], Pause]
    marks: Path


def note_criu(context: Context, visit: Visit) -> None:
    """Have the next keeper know it."""
    context.state = replace(context.state, criu=visit.criu, criu_start=visit.criu_start)
    context.note(pid=visit.pid)


def why_over(context: Context, number: int) -> str:
    """Why the rank is in no checkpoint, for whoever has asked the engine for one."""
    try:
        epoch, _ = epochs.phase(context.store, context.keys, number)
    except CheckpointError as exc:
        return f"epoch {number} is given up: {exc}"
    return f"epoch {number} is {epoch.phase}" + (f": {epoch.note}" if epoch.note else "")


class Contained(Checkpointing):
    """An epoch that is a checkpoint."""

    def __init__(self, context: Context, order: Order, visits: Visits, engine: Engine) -> None:
        super().__init__(context, order)
        self._visits = visits
        self._engine = engine
        self._pause: Pause | None = None
        self._refused = ""  # by the engine
        self._ours = EnginesCriu(context, visits, POST_DUMP)
        self.criu = self._ours
        self.images = Path(context.state.images)
        self._evidence = True  # no neighbour is told anything: copies are the agent's

    def look(self) -> None:
        """Waits for the engine's criu, whose script stands before anything was touched."""
        context = self.context
        visit = self._awaited()
        if visit.leaves_running != self.order.leave_running:
            words = ("to end its tasks", "to leave them running")
            raise JobError(
                f"{context.name}: its engine was asked {words[visit.leaves_running]}, and the "
                f"checkpoint of the job is {words[self.order.leave_running]}"
            )
        note_criu(context, visit)
        self._pause = self._engine.pause(visit.container)
        # A kernel of another rank may wait for this one; and the driver locks no task that stands.
        self._pause.lift()
        context.lock.close()
        context.lock = Lock(context.place.job, context.place.rank, visit.pid)
        require_unlocked(context.name, context.state.pid)
        context.say_where(visit.pid)
        tree = Tree(visit.pid)
        try:
            communicators.require(context, cuda_processes(tree.pids), stands=False)
        finally:
            tree.close()

    def _awaited(self) -> Visit:
        context, awaited = self.context, self.context.keys.awaited(self.order.number)
        if awaited not in context.store.read(awaited).entries:  # nobody asks the engine but us
            threading.Thread(target=self._asked, daemon=True).start()
        visit = self._visits.wait(
            lambda: self._visits.first(PRE_DUMP, self.order.number),
            lambda: not (self.stopping.is_set() or self._refused),
        )
        if visit is None:
            raise JobError(
                f"{context.name}: "
                + (self._refused or "nobody has asked its container's engine for a checkpoint")
            )
        return visit

    def _asked(self) -> None:
        try:
            self._engine.ask(self.order, self.stopping.is_set)
        except Exception as exc:  # noqa: BLE001 - whatever it is, there is no dump
            self._refused = str(exc) or type(exc).__name__
            log.warning("%s: its engine: %s", self.context.name, self._refused)

    def _addresses(self) -> frozenset[str]:
        return own_addresses(self.context.state.pid)

    def lock_cuda(self) -> None:
        """All ranks have said where they are by now."""
        self._require_criu()
        tree = Tree(self.context.state.pid)
        try:
            self._require_known(look(tree.pids))
        finally:
            tree.close()
        super().lock_cuda()

    def _require_criu(self) -> Visit:
        """The one that was looked at waits still: another one has been looked at by nobody."""
        visit = self._ours.at(PRE_DUMP)
        if visit is None:
            raise JobError(
                f"{self.context.name}: its container's criu has ended before it was to dump"
            )
        return visit

    def dump(self) -> str:
        """The record, with criu's script at `post-dump`."""
        context = self.context
        visit = self._require_criu()
        self.images = _directory(visit)
        context.note(images=str(self.images))
        begin = time.monotonic()
        self._put_back()
        visit.answer(yes=True)
        if self._ours.comes_to(POST_DUMP) is None:
            raise JobError(
                f"{context.name}: criu has ended without a dump in {self.images}; its log says why"
            )
        self.criu.seconds = time.monotonic() - begin
        return self._recorded()

    def release(self) -> None:
        self._ours.reason = why_over(self.context, self.order.number)
        self._know_pause()
        with suppress(CheckpointError):  # it runs then, as it is to
            self._put_back()
        if not self.is_touched():
            self._ours.end(yes=False)
        super().release()

    def finish(self, *, leave_running: bool) -> None:
        self._know_pause()
        super().finish(leave_running=leave_running)

    def _put_back(self) -> None:
        """For an engine whose criu waits: it will end its pause. One whose criu has ended may have
        done that already, and nobody would end another pause."""
        pause, ours = self._pause, self._ours
        if pause is None or not ours.is_there():
            return
        pause.put_back()
        if ours.is_there():
            return
        deadline = time.monotonic() + _RESUMED_S
        while pause.is_on() and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        pause.lift()

    def _know_pause(self) -> None:
        """If an agent before this one has begun it."""
        visit = self._ours.at(POST_DUMP)
        if self._pause is None and visit is not None:
            self._pause = self._engine.pause(visit.container)

    def _bring_back(self) -> None:
        """Once the engine has ended its pause, after what it has to do with the images."""
        while self._pause is not None and self._pause.is_on() and self.context.state.lives:
            time.sleep(_POLL_S)
        super()._bring_back()

    def _remove_images(self) -> None:
        """They are the engine's. But the container has not ended, whatever the plugin took it
        for when criu had written everything."""
        with suppress(OSError):
            directory = os.open(self._engine.marks, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                for one in self._engine.marks.glob("*.checkpointed"):
                    if one.stem in Path(f"/proc/{self.context.state.pid}/cgroup").read_text(
                        errors="replace"
                    ):
                        remove(directory, one.name)
            finally:
                os.close(directory)

    def _let_go(self) -> None:
        """It has no safe points."""


class ContainedRestore(HasCriu):
    """A rank.Part: an epoch that restores. The engine has begun to; nothing runs before all ranks
    stand."""

    def __init__(self, context: Context, order: Order, visits: Visits) -> None:
        super().__init__(context, order, Path(context.state.images))
        self._visits = visits
        self._ours = EnginesCriu(context, visits, PRE_RESUME)
        self.criu = self._ours

    def look(self) -> None:
        """Waits for the engine's criu. It restores what was committed."""
        context = self.context
        visit = self._visits.wait(
            lambda: self._visits.first(POST_RESTORE, self.order.number),
            lambda: not self.stopping.is_set(),
        )
        if visit is None:
            raise JobError(f"{context.name}: nobody has asked its container's engine to restore it")
        self.images = _directory(visit)
        note_criu(context, visit)
        require_same(replace(self._read(), directory=str(self.images)))

    def _read(self) -> DumpRecord:
        context, number = self.context, self.order.restores
        found = epochs.standing(context.store, context.keys, number)
        if not found.is_whole or found.plan.world != context.world:
            raise JobError(f"epoch {number} is no whole checkpoint of {context.world} ranks")
        return record_of(found.records[context.place.rank], f"epoch {number}, {context.name}")

    def lock_cuda(self) -> None:
        """They come back locked, as they were dumped."""

    def lock_network(self) -> None:
        """From here on there is something to undo."""
        context = self.context
        self.touched = True
        context.note(epoch=self.order.number, images=str(self.images), cuda=True)

    def dump(self) -> str:
        """All is back; they stand."""
        context = self.context
        visit = self._ours.at(POST_RESTORE)
        if visit is None:
            raise JobError(f"{context.name}: its container's criu has ended")
        visit.answer(yes=True)
        if self._ours.comes_to(PRE_RESUME) is None:
            raise JobError(f"{context.name}: criu has not brought it back; its log says why")
        return json.dumps({"version": 1, "restored": self.order.restores, "pid": context.state.pid})

    def release(self) -> None:
        """None of it may run: criu does not heed what its last script says."""
        context, ours = self.context, self._ours
        ours.reason = why_over(context, self.order.number)
        while ours.is_there() and ours.at(PRE_RESUME) is None:
            if (first := ours.at(POST_RESTORE)) is not None:
                first.answer(yes=False, reason=ours.reason)  # criu kills them
            time.sleep(_POLL_S)
        if not (ours.is_there() or self.is_touched()) or not context.state.lives:
            return
        tree = Tree(context.state.pid)
        try:
            tree.kill()
            # criu waits for the container's first process, and the kernel, before it lets that end,
            # for criu to hear of the ends of its threads: without criu both come to their end.
            ours.kill()
            if not tree.all_ended(_ENDED_S, lambda: None):
                raise JobError(f"{context.name}: not every process has ended, of {tree.pids}")
        finally:
            tree.close()
        context.note(pid=0, cuda=False)

    def finish(self, *, leave_running: bool) -> None:
        """They run, with the GPUs that the dump had found locked."""
        context = self.context
        self._ours.end(yes=True)
        if not context.state.lives:
            raise JobError(f"{context.name}: its tasks have ended")
        if wrong := unlock_tree(context.state.pid):
            raise JobError(f"{context.name}: {'; '.join(wrong)}")
        context.note(cuda=False)


def _directory(visit: Visit) -> Path:
    """Of its images, by a path that stays. Raises JobError if it leads elsewhere from here."""
    real = Path(os.path.realpath(visit.images))
    try:
        if os.path.samestat(real.stat(), visit.images.stat()):
            return real
    except OSError as exc:
        raise JobError(f"the images of container {visit.container}: {exc}") from exc
    raise JobError(f"{real} is another directory for criu: the agent has to see the host's files")
