# SPDX-License-Identifier: Apache-2.0
"""Signals that a test sends to its own process, as to a keeper: never before they are expected,
for they would end it."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


def catches(pid: int, number: int) -> bool:
    """Whether that process does something of its own with this signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = int(status.split("SigCgt:")[1].split()[0], 16)
    return bool(caught & 1 << (number - 1))


@contextmanager
def signalled(
    number: int,
    is_ready: Callable[[], bool] = lambda: True,
    then: Callable[[], object] = lambda: None,
) -> Iterator[None]:
    """What runs here meanwhile gets that signal, once it catches it and the other side is ready
    for it. then: what is done after that, beside it."""
    assert not catches(os.getpid(), number)
    over = threading.Event()

    def send() -> None:
        while not (catches(os.getpid(), number) and is_ready()):
            if over.wait(0.01):
                return
        os.kill(os.getpid(), number)
        then()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
