# SPDX-License-Identifier: Apache-2.0
"""Calls that must not wait for ever."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")
_AT_ONCE_S = 0.001  # 0 would switch a timer off


class LateError(Exception):
    """No OSError, as TimeoutError is one: nothing but the test must catch it."""


def run_with_deadline(call: Callable[[], T], seconds: int = 20) -> T:
    """What `call` returns. Raises LateError in it if that takes longer; main thread only.

    A timer that runs already (pytest-timeout's) goes on afterwards; there is one per process.
    """

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise LateError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    begun = time.monotonic()
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left > 0:
            due = left - (time.monotonic() - begun)
            signal.setitimer(signal.ITIMER_REAL, max(due, _AT_ONCE_S), interval)
