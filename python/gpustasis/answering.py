# SPDX-License-Identifier: Apache-2.0
"""Answers of the driver's libraries, which may never come: a GPU that has failed holds them up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, Queue
from typing import TypeVar

from gpustasis.errors import DriverError

ANSWER_S = 10.0  # of an answer that needs no GPU work
Answer = TypeVar("Answer")


class TimedOutError(DriverError):
    """The driver was asked and has not answered yet."""


def answer_within(seconds: float, what: str, call: Callable[[], Answer]) -> Answer:
    """What `call` gives, for who only looks: a driver that hangs is not waited for. The thread that
    waits for it is left behind and ends with this process.

    Raises whatever `call` does, DriverError if the driver refuses, or TimedOutError.
    """
    answers: Queue[tuple[Answer] | Exception] = Queue()

    def ask() -> None:
        try:
            answers.put((call(),))
        except Exception as exc:  # noqa: BLE001  # the caller gets it
            answers.put(exc)

    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=seconds)
    except Empty:
        raise TimedOutError(f"{what}: no answer within {seconds:g} s") from None
    if isinstance(answer, Exception):
        raise answer
    return answer[0]
