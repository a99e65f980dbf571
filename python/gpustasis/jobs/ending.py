# SPDX-License-Identifier: Apache-2.0
"""How a rank comes to its end, and whether a signal to its keeper was why."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType
from typing import Self

from gpustasis.jobs.rank import Context

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OUTLIVED_S = 600.0  # tasks that live so long after a signal were not ended by it
_SEEN_S = 5.0
_DIES_WITHIN_S = 30.0
_AGAIN_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """How it came to an end for this rank. epoch: of the checkpoint that ended its tasks; 0: none
    did. status: of its command, as a shell has it; None: it is not known, for another keeper has
    started them. told: this one was told to end."""

    epoch: int
    status: int | None
    told: bool = False


@dataclass(frozen=True, slots=True)
class Next:
    """START: the command. FAILED: the job has, and why. DONE: all ranks have ended."""

    start: bool = False
    failed: str = ""
    done: bool = False


@dataclass(slots=True)
class Dying:
    """A root whose first thread has ended: then the others do, and its memory goes, and how it has
    ended is known. Not for ever: a program may run on without that thread."""

    _root: int = 0  # its start time
    _since: float = 0.0

    def goes_on(self, context: Context) -> bool:
        """A moment later it may not."""
        state, now = context.state, time.monotonic()
        if state.lives:
            return False
        if self._root != state.start_time:
            self._root, self._since = state.start_time, now
        if now > self._since + _DIES_WITHIN_S:
            return False
        time.sleep(_AGAIN_S)
        return True


@dataclass(slots=True)
class Early:
    """Signals that come when there may be tasks, and before a Supervisor forwards them: neither do
    they end the keeper, nor are they lost. A context."""

    _came: list[int] = field(default_factory=list)
    _before: dict[int, Callable[[int, FrameType | None], object] | int | None] = field(
        default_factory=dict
    )

    def hold(self) -> None:
        """From now on."""
        for number in FORWARDED:
            if number not in self._before:
                self._before[number] = signal.signal(number, self._note)

    def let_end(self) -> None:
        """Those that end a keeper do so until they are held again, also one that has come: there
        are no tasks yet, and what is awaited may never come."""
        for one in ENDING:
            if one in self._before:
                signal.signal(one, self._before.pop(one))
        came = [number for number in self._came if number in ENDING]
        self._came = [number for number in self._came if number not in ENDING]
        for number in came:
            signal.raise_signal(number)

    def reach(self, handler: Callable[[int, FrameType | None], object]) -> None:
        """It heeds what comes now, and has what has come."""
        for number in self._came:
            handler(number, None)

    def _note(self, number: int, _: object) -> None:
        self._came.append(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            if signal.getsignal(number) == self._note:  # else somebody else heeds it
                signal.signal(number, handler)


class Signal:
    """That the keeper was told to end (Context.told_at). may_lapse: by SIGHUP alone, which programs
    take for other things, too."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self.may_lapse = True
        self._looked = time.monotonic()

    def comes(self, number: int) -> None:
        self.may_lapse = self.may_lapse and number == signal.SIGHUP
        self._context.told_at = time.monotonic()

    def was_outlived(self) -> bool:
        """The tasks live. Whether they do so in spite of a signal, which is forgotten then. While
        nobody asks this an epoch may hold them: that time does not count."""
        context, now = self._context, time.monotonic()
        unseen_s, self._looked = now - self._looked, now
        if not context.told_at or not self.may_lapse:
            return False
        if unseen_s > _SEEN_S:
            context.told_at = min(now, context.told_at + unseen_s)
        if now < context.told_at + _OUTLIVED_S:
            return False
        context.told_at = 0.0
        return True
