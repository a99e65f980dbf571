# SPDX-License-Identifier: Apache-2.0
"""Pids that a restore needs: others on this machine start processes as well, and may have one."""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import time
from pathlib import Path

from gpustasis.criu.images import INVENTORY_NAME, read_pstree
from gpustasis.errors import ImageError
from gpustasis.task import read_task
from support.job import POLL_S, TIMEOUT_S

_PATIENCE_S = 5.0
_CLONE3 = 435  # x86-64
_TICKS = os.sysconf("SC_CLK_TCK")


class _CloneArguments(ctypes.Structure):
    """struct clone_args, linux/sched.h."""

    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            *("flags", "pidfd", "child_tid", "parent_tid", "exit_signal", "stack", "stack_size"),
            *("tls", "set_tid", "set_tid_size", "cgroup"),
        )
    )


def await_free(images: Path) -> None:
    """Wait for the end of processes and threads that have a pid of the tree in `images` and were
    started after its dump. Not for ever: criu says it if one stays."""
    try:
        made = (images / INVENTORY_NAME).stat().st_mtime
        tids = [tid for task in read_pstree(images) for tid in (task.pid, *task.threads)]
    except (OSError, ImageError):
        return  # damaged, for a test
    deadline = time.monotonic() + _PATIENCE_S
    while any(_is_younger(tid, made) for tid in tids) and time.monotonic() < deadline:
        time.sleep(POLL_S)


def _is_younger(tid: int, made: float) -> bool:
    try:
        stat = Path(f"/proc/{tid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    started = int(stat.rpartition(") ")[2].split()[19]) / _TICKS
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started < time.time() - made


def sleep_as(pid: int) -> None:
    """Start a `sleep` of this pid. Not by ns_last_pid: from there on everybody would be given pids
    that others have freed just now, to have them back at a restore."""
    number = (ctypes.c_int * 1)(pid)
    arguments = _CloneArguments(
        exit_signal=signal.SIGCHLD, set_tid=ctypes.addressof(number), set_tid_size=1
    )
    libc = ctypes.PyDLL(None, use_errno=True)  # the child has the interpreter's lock
    deadline = time.monotonic() + TIMEOUT_S
    while (
        made := libc.syscall(_CLONE3, ctypes.byref(arguments), ctypes.sizeof(arguments))
    ) < 0 and ctypes.get_errno() == errno.EEXIST:
        assert time.monotonic() < deadline, f"pid {pid} is another process's: {read_task(pid)}"
        time.sleep(POLL_S)
    if made == 0:
        try:
            os.execv("/bin/sleep", ["sleep", "60"])
        finally:
            os._exit(127)
    assert made == pid, os.strerror(ctypes.get_errno())
