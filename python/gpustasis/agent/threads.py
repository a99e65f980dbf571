# SPDX-License-Identifier: Apache-2.0
"""Threads for what the loop may not wait for. None of them waits for another one to end first, as
in a pool, and one that never ends does not hold up the agent's end."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

Found = TypeVar("Found")


async def in_thread(call: Callable[[], Found]) -> Found:
    """What `call` returns or raises. Its thread goes on if this is cancelled."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Found] = loop.create_future()

    def note(error: BaseException | None, found: Found | None) -> None:
        if future.done():
            return  # cancelled
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(found)  # type: ignore[arg-type]

    def run() -> None:
        error, found = None, None
        try:
            found = call()
        except BaseException as exc:  # noqa: BLE001 - raised where it is awaited
            error = exc
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(note, error, found)

    threading.Thread(target=run, daemon=True).start()
    return await future
