# SPDX-License-Identifier: Apache-2.0
"""A process that stands still in its exit, however long it is asked to."""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import select
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_USERFAULTFD = {"x86_64": 323}.get(platform.machine(), 282)
_API, _API_VERSION = 0xC018AA3F, 0xAA
_REGISTER, _MISSING = 0xC020AA00, 1
_PATIENCE_MS = 60_000


@contextmanager
def held_pipe(descriptor: int) -> Iterator[None]:
    """Whoever closes an end of this pipe, the writing one of which is here, waits for it meanwhile:
    it is being written to, out of memory that comes when this is over."""
    libc = ctypes.CDLL(None, use_errno=True)
    memory = mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    first = ctypes.c_char.from_buffer(memory)
    address = ctypes.addressof(first)
    faults = libc.syscall(_USERFAULTFD, os.O_CLOEXEC | os.O_NONBLOCK)
    assert faults >= 0, os.strerror(ctypes.get_errno())
    arguments = (descriptor, ctypes.c_void_p(address), ctypes.c_size_t(1))
    writer = threading.Thread(target=libc.write, args=arguments)
    try:
        fcntl.ioctl(faults, _API, struct.pack("3Q", _API_VERSION, 0, 0))
        register = struct.pack("4Q", address, mmap.PAGESIZE, _MISSING, 0)
        fcntl.ioctl(faults, _REGISTER, register)
        writer.start()
        waiting = select.poll()
        waiting.register(faults, select.POLLIN)
        assert waiting.poll(_PATIENCE_MS) == [(faults, select.POLLIN)], "nobody asks for the memory"
        yield
    finally:
        os.close(faults)
        if writer.ident is not None:
            writer.join()
