# SPDX-License-Identifier: Apache-2.0
"""The driver's checkpoint calls, raw: any pid, any argument bytes, no judgement of the answer.

`gpustasis.driver` is the API to use; this one exists to make the mistakes that the other prevents.
"""

from __future__ import annotations

import ctypes
import time
from typing import TypedDict

ARGUMENT_SIZE = 64  # bytes of every CUcheckpoint*Args structure, cuda.h 12.8 to 13.4

QUERIES = ("GetRestoreThreadId", "GetState")
TRANSITIONS = ("Lock", "Checkpoint", "Restore", "Unlock")


class Answer(TypedDict):
    """What a call answered. `value` is the thread id or the state that a query gave."""

    result: int
    name: str
    value: int | None
    seconds: float


class RawDriver:
    """libcuda.so.1, loaded into this process. Raises OSError if there is none."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL("libcuda.so.1")

    def version(self) -> int:
        """Return the driver's CUDA version, 1000 * major + 10 * minor. Needs no cuInit."""
        version = ctypes.c_int()
        self._library.cuDriverGetVersion(ctypes.byref(version))
        return version.value

    def init(self) -> Answer:
        """Call cuInit(0)."""
        start = time.monotonic()
        result = self._library.cuInit(0)
        return self._answer(result, None, start)

    def device_name(self) -> str:
        """Return the name of the first GPU, or "" if there is none. Needs cuInit."""
        device = ctypes.c_int()
        name = ctypes.create_string_buffer(256)
        if self._library.cuDeviceGet(ctypes.byref(device), 0) != 0:
            return ""
        self._library.cuDeviceGetName(name, 256, device)
        return name.value.decode(errors="replace")

    def call(self, name: str, pid: int, arguments: bytes | None = None) -> Answer:
        """Call cuCheckpointProcess<name> on `pid`.

        arguments: ARGUMENT_SIZE bytes for one of TRANSITIONS, None for a null pointer.
        Raises AttributeError if this driver has no such function.
        """
        function = getattr(self._library, f"cuCheckpointProcess{name}")
        if name in QUERIES:
            value = ctypes.c_int(-1)
            start = time.monotonic()
            result = function(ctypes.c_int(pid), ctypes.byref(value))
            return self._answer(result, value.value if result == 0 else None, start)
        buffer = None
        if arguments is not None:
            if len(arguments) != ARGUMENT_SIZE:
                raise ValueError(f"arguments are {len(arguments)} bytes, not {ARGUMENT_SIZE}")
            buffer = ctypes.create_string_buffer(arguments, ARGUMENT_SIZE)
        start = time.monotonic()
        result = function(ctypes.c_int(pid), buffer)
        return self._answer(result, None, start)

    def _answer(self, result: int, value: int | None, start: float) -> Answer:
        seconds = time.monotonic() - start
        text = ctypes.c_char_p()
        self._library.cuGetErrorName(ctypes.c_int(result), ctypes.byref(text))
        name = text.value.decode("ascii") if text.value else f"unknown error {result}"
        return {"result": result, "name": name, "value": value, "seconds": round(seconds, 6)}
