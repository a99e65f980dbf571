# SPDX-License-Identifier: Apache-2.0
"""Work that is to be in nobody's way: the job runs meanwhile.

Source: setpriority(2) and ioprio_set(2), which Linux applies to the calling thread; linux/ioprio.h.
"""

from __future__ import annotations

import ctypes
import os
import platform

_NICE = 19
_WHO_PROCESS = 1  # IOPRIO_WHO_PROCESS; 0: the calling thread
_BEST_EFFORT = 2 << 13 | 7  # IOPRIO_CLASS_BE, the lowest level: idle may never get its turn
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}  # asm/unistd.h


def lower() -> None:
    """Give the calling thread, and what it starts, nice 19 and the lowest level of the disk's
    best-effort class. What the kernel refuses costs others time, and nothing else."""
    os.setpriority(os.PRIO_PROCESS, 0, _NICE)
    number = _IOPRIO_SET.get(platform.machine())
    if number is not None:
        ctypes.CDLL(None, use_errno=True).syscall(number, _WHO_PROCESS, 0, _BEST_EFFORT)
