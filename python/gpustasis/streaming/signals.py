# SPDX-License-Identifier: Apache-2.0
"""Signals while a stream is sent or received: noted, and answered where it is safe."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, Self

from gpustasis.errors import StreamError

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
# Whoever stopped here would leave a job standing that was frozen. They are caught and not ignored:
# a program that is started would inherit that.
_NO_STOP = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)


class Signals:
    """From `with` on, those that would end this process are only noted; Ctrl-Z does nothing."""

    def __init__(self) -> None:
        self._before: dict[signal.Signals, Any] = {}
        self._found: signal.Signals | None = None
        self._at_once = False

    def __enter__(self) -> Self:
        for number in _STOPPING:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup has it
                self._before[number] = signal.signal(number, self._note)
        for number in _NO_STOP:
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._before[number] = signal.signal(number, self._go_on)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise StreamError if one has come."""
        if self._found is not None:
            raise StreamError(f"stopped by {self._found.name}")

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """Meanwhile one that comes raises StreamError wherever this thread is: of a wait that calls
        no check."""
        self._at_once = True
        try:
            self.check()
            yield
        finally:
            self._at_once = False

    def forget(self) -> None:
        """What has come until now stops nothing any more."""
        self._found = None

    def _go_on(self, number: int, frame: FrameType | None) -> None:
        """Nothing."""

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._found = signal.Signals(number)
        if self._at_once:
            self.check()
