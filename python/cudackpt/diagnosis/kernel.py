"""What the kernel can do for us, each tried without side effects."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from cudackpt.diagnosis.finding import Finding, note, ok, problem

_CLONE3 = 435  # x86-64 and every other architecture
_CLONE_ARGS_SIZE = 80  # CLONE_ARGS_SIZE_VER1: with set_tid
_SET_TID_SIZE_OFFSET = 72
_TOO_MANY_LEVELS = 1000  # more pid namespaces than can be nested
_SOFT_DIRTY_BIT = 55  # of an entry of /proc/PID/pagemap

_UPGRADE = "use a kernel >= 5.5 and let no seccomp filter forbid it"


def check() -> list[Finding]:
    return [_memory_access(), _pidfd(), _set_tid(), _checkpoint_restore(), _soft_dirty()]


def _memory_access() -> Finding:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.process_vm_readv.restype = ctypes.c_ssize_t
    nothing = ctypes.c_ulong(0)
    if libc.process_vm_readv(os.getpid(), None, nothing, None, nothing, nothing) == 0:
        return ok("process_vm_readv", "available")
    text = os.strerror(ctypes.get_errno())
    return problem("process_vm_readv", text, "use a kernel with CONFIG_CROSS_MEMORY_ATTACH=y")


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as exc:
        return problem("pidfd_open", str(exc.strerror), _UPGRADE)
    return ok("pidfd_open", "available")


def _set_tid() -> Finding:
    """clone3 with more pids than there can be: a kernel that knows the field says EINVAL."""
    libc = ctypes.CDLL(None, use_errno=True)
    arguments = ctypes.create_string_buffer(_CLONE_ARGS_SIZE)
    ctypes.c_uint64.from_buffer(arguments, _SET_TID_SIZE_OFFSET).value = _TOO_MANY_LEVELS
    libc.syscall(ctypes.c_long(_CLONE3), arguments, ctypes.c_size_t(_CLONE_ARGS_SIZE))
    error = ctypes.get_errno()
    if error == errno.EINVAL:
        return ok("clone3 with set_tid", "available")
    return problem("clone3 with set_tid", os.strerror(error), _UPGRADE)


def _checkpoint_restore() -> Finding:
    name = "CONFIG_CHECKPOINT_RESTORE"
    if Path("/proc/sys/kernel/ns_last_pid").exists():
        return ok(name, "set")
    return problem(name, "not set in this kernel", "use a distribution's kernel, or build with it")


def _soft_dirty() -> Finding:
    """A page just written is soft-dirty, where there is such a thing."""
    name = "CONFIG_MEM_SOFT_DIRTY"
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
            pagemap.seek(address // mmap.PAGESIZE * 8)
            entry = int.from_bytes(pagemap.read(8), "little")
    if entry >> _SOFT_DIRTY_BIT & 1:
        return ok(name, "set")
    return note(name, "not set: CRIU's own incremental dumps (--track-mem) will not work")
