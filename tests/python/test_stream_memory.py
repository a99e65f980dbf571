# SPDX-License-Identifier: Apache-2.0
"""A measurement that breaks off is none."""

from __future__ import annotations

import os
import threading

import pytest

from campaigns import stream_memory


def test_a_watch_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    looked = threading.Event()

    def fail() -> list[int]:
        if threading.current_thread() is threading.main_thread():
            return [os.getpid()]
        looked.set()
        raise ValueError("no number")

    monkeypatch.setattr(stream_memory, "_processes", fail)
    with pytest.raises(ValueError, match="no number"), stream_memory.Watch():
        assert looked.wait(10)
