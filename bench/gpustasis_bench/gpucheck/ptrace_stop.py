# SPDX-License-Identifier: Apache-2.0
"""Stop every thread of a process the way CRIU does, and let it go again."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

_SEIZE, _INTERRUPT, _DETACH = 0x4206, 0x4207, 17  # linux/ptrace.h
_WALL = 0x40000000  # __WALL: wait for threads as well

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


def _ptrace(request: int, tid: int) -> None:
    if _libc.ptrace(request, tid, None, None) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"ptrace request {request:#x} on thread {tid}: {os.strerror(code)}")


@contextmanager
def ptrace_stopped(pid: int) -> Iterator[None]:
    """Hold all threads of `pid` in a ptrace stop. Raises OSError if that is not allowed.

    Enter and leave on one thread: ptrace ties a tracee to the thread that traces it.
    """
    held: list[int] = []
    try:
        while True:  # until a look finds no thread that is not held: they may still start new ones
            new = [t for t in map(int, os.listdir(f"/proc/{pid}/task")) if t not in held]
            if not new:
                break
            for tid in new:
                _ptrace(_SEIZE, tid)
                held.append(tid)
                _ptrace(_INTERRUPT, tid)
                os.waitpid(tid, _WALL)
        yield
    finally:
        for tid in held:
            _ptrace(_DETACH, tid)
