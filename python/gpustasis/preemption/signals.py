# SPDX-License-Identifier: Apache-2.0
"""The signals that a supervisor is sent, kept with the moment of each until it looks."""

from __future__ import annotations

import os
import select
import signal
import time
from collections import deque
from types import FrameType, TracebackType
from typing import Any, Self

# Upon the first the job is checkpointed; the others are the job's own, and passed on.
ENDING = signal.SIGTERM
PASSED_ON = (signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


class Signals:
    """A context manager: while it is open no signal ends this process but SIGKILL and its like.
    What was ignored stays so."""

    def __init__(self) -> None:
        self._came: deque[tuple[int, float]] = deque()
        self._reading, self._writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Self:
        self._wakeup = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        for number in (ENDING, *PASSED_ON):
            if number == ENDING or signal.getsignal(number) != signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._note)
        self._before[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda *_: None)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self._reading)
        os.close(self._writing)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._came.append((number, time.monotonic()))

    @property
    def ending(self) -> bool:
        """Whether this process was told to end, and nobody has looked yet."""
        return self.asked is not None

    @property
    def asked(self) -> float | None:
        """When that was, by time.monotonic()."""
        return next((moment for number, moment in self._came if number == ENDING), None)

    def wait(self, timeout_s: float | None = None) -> None:
        """Until a signal comes, a child's end among them, unless one came since the last time; at
        most for that long."""
        if not self._came:
            select.select([self._reading], [], [], timeout_s)
        try:
            while os.read(self._reading, 4096):
                pass
        except BlockingIOError:
            return

    def take(self) -> list[tuple[int, float]]:
        """Those that came, each with its moment by time.monotonic(), the first one first."""
        found = []
        while self._came:
            found.append(self._came.popleft())
        return found

    def forget(self, number: int) -> None:
        """Those of this number that came up to now."""
        kept = [each for each in self.take() if each[0] != number]
        self._came.extendleft(reversed(kept))
