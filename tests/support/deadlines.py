# SPDX-License-Identifier: Apache-2.0
"""Calls that must not wait for ever."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import NoReturn, TypeVar

T = TypeVar("T")


class LateError(Exception):
    """No OSError, as TimeoutError is one: nothing but the test must catch it."""


def run_with_deadline(call: Callable[[], T], seconds: int = 20) -> T:
    """What `call` returns. Raises LateError in it if that takes longer; main thread only."""

    def end(number: int, frame: FrameType | None) -> NoReturn:
        raise LateError(f"it did not end within {seconds} s")

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        return call()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
