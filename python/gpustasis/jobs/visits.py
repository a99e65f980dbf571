# SPDX-License-Identifier: Apache-2.0
"""The criu that a container engine has started for a rank, and its action script, which waits for
an answer (src/rank_script).

criu goes no further than its script allows. Between two scripts it is at work, and is not stopped.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis.errors import CheckpointError
from gpustasis.jobs.rank import Context, CriuAtGate
from gpustasis.task import read_task

_POLL_S = 0.02
# How runc and crun, and criu itself, are told that the tasks run on after a dump.
_LEAVES_RUNNING = frozenset((b"--leave-running", b"-R"))


@dataclass(slots=True, kw_only=True)
class Visit:
    """A script that waits. pid: of the root of the tasks. criu, criu_start: who has started it.
    images: the directory of the dump. leaves_running: what is to be done with the tasks after a
    dump that succeeds. epoch: that it is in; 0: it is not known yet. over: it was answered, or is
    gone. since, looked: when it has come, and was looked after last, of the monotonic clock."""

    action: str
    container: str
    pid: int
    criu: int
    criu_start: int
    images: Path
    leaves_running: bool
    epoch: int = 0
    since: float = field(default_factory=time.monotonic)
    looked: float = 0.0
    over: threading.Event = field(default_factory=threading.Event)
    _said: list[str] = field(default_factory=list)

    @property
    def whose(self) -> tuple[int, int]:
        """Of which criu."""
        return self.criu, self.criu_start

    def answer(self, *, yes: bool, reason: str = "") -> None:
        """Once."""
        if not self.over.is_set():
            self._said.append("go" if yes else f"no {' '.join(reason.split())}")
            self.over.set()

    @property
    def said(self) -> str:
        """The answer; empty: it is gone without one."""
        return self._said[0] if self._said else ""


def leaves_running(criu: int) -> bool:
    """Whether it was asked to let the tasks run on after a dump: by its own words, or those of the
    runtime that has started it."""
    with suppress(OSError, CheckpointError, IndexError, ValueError):
        stat = Path(f"/proc/{criu}/stat").read_text(errors="replace")
        parent = int(stat.rpartition(")")[2].split()[1])
        words = Path(f"/proc/{criu}/cmdline").read_bytes().split(b"\0")
        words += Path(f"/proc/{parent}/cmdline").read_bytes().split(b"\0")
        return not _LEAVES_RUNNING.isdisjoint(words)
    return False


class Visits:
    """Of one rank, from all criu's."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[Visit] = []
        self._lost: set[tuple[tuple[int, int], str]] = set()

    def add(self, visit: Visit) -> None:
        with self._changed:
            self._waiting.append(visit)
            self._changed.notify_all()

    def remove(self, visit: Visit) -> None:
        """It has got its answer, or is gone."""
        with self._changed:
            self._waiting.remove(visit)
            if not visit.said:
                self._lost.add((visit.whose, visit.action))
            self._changed.notify_all()

    def all(self) -> list[Visit]:
        """Those that wait."""
        with self._changed:
            return [one for one in self._waiting if not one.over.is_set()]

    def first(self, action: str, epoch: int) -> Visit | None:
        """The last one that waits at this action, one of FIRST, to be in this epoch."""
        found = [one for one in self.all() if (one.action, one.epoch) == (action, epoch)]
        return found[-1] if found else None

    def of(self, whose: tuple[int, int], action: str = "") -> Visit | None:
        """That of this criu, if it waits; action: at this one. There may be others: of another
        criu, for a container that says it is the same rank."""
        found = [one for one in self.all() if one.whose == whose and action in {"", one.action}]
        return found[-1] if found else None

    def wait(self, find: Callable[[], Visit | None], goes_on: Callable[[], bool]) -> Visit | None:
        """Until there is one; None: goes_on has become false before."""
        while (found := find()) is None and goes_on():
            with self._changed:
                self._changed.wait(_POLL_S)
        return found

    def was_lost(self, whose: tuple[int, int], action: str) -> bool:
        """Whether a script of this criu has ended without an answer: criu takes it for a no."""
        return (whose, action) in self._lost

    def refuse(self, reason: str, upto: int) -> None:
        """Whoever waits for an epoch that is over."""
        for one in self.all():
            if 0 < one.epoch <= upto:
                one.answer(yes=False, reason=reason)


class EnginesCriu(CriuAtGate):
    """As a criu of ours at its gate. holds: the action at which its tasks stand, and it waits for
    what is decided. reason: what it is told when it is told no."""

    def __init__(self, context: Context, visits: Visits, holds: str) -> None:
        super().__init__(context, Path())
        self._visits = visits
        self._holds = holds
        self.reason = "the epoch was aborted"

    @property
    def _whose(self) -> tuple[int, int]:
        state = self._context.state
        return state.criu, state.criu_start

    def at(self, action: str) -> Visit | None:
        """Its script, if it waits there."""
        return self._visits.of(self._whose, action)

    def comes_to(self, action: str) -> Visit | None:
        """Its script, once it waits there; None: criu has ended before."""
        return self._visits.wait(lambda: self.at(action), self.is_there)

    def _pids(self) -> list[int]:
        state = self._context.state
        with suppress(CheckpointError):
            if state.criu and read_task(state.criu).start_time == state.criu_start:
                return [state.criu]
        return []

    def end(self, *, yes: bool) -> None:
        while self.is_there():
            if (one := self._visits.of(self._whose)) is not None:
                one.answer(yes=yes, reason=self.reason)
            time.sleep(_POLL_S)

    def kill(self) -> None:
        """Until it has ended."""
        while pids := self._pids():
            with suppress(ProcessLookupError):
                descriptor = os.pidfd_open(pids[0])
                try:
                    if self._pids():  # it is that one still
                        signal.pidfd_send_signal(descriptor, signal.SIGKILL)
                finally:
                    os.close(descriptor)
            time.sleep(_POLL_S)

    def slipped(self) -> str:
        """A script that waited for an agent before this one may not have come here yet."""
        if self.is_there() and not self._visits.was_lost(self._whose, self._holds):
            return ""
        return f"{self._context.name}: its container's criu has gone on before anything was decided"
