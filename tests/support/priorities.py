# SPDX-License-Identifier: Apache-2.0
"""What a thread may have of the processors and of the disk."""

from __future__ import annotations

import ctypes
import os
import platform

_IOPRIO_GET = {"x86_64": 252, "aarch64": 31}  # asm/unistd.h
_WHO_PROCESS = 1  # IOPRIO_WHO_PROCESS; 0: the calling thread


def priority() -> str:
    """Of the calling thread: nice, the disk's class (2: best-effort), and the level in it."""
    number = _IOPRIO_GET[platform.machine()]
    of_the_disk = ctypes.CDLL(None, use_errno=True).syscall(number, _WHO_PROCESS, 0)
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    return f"nice {nice}, disk {of_the_disk >> 13}/{of_the_disk & 0x1FFF}"
