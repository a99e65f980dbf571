"""What the kernel can do for us, each tried without side effects."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

from gpustasis.diagnosis.finding import Finding, note, ok, problem

_CLONE3 = 435  # x86-64 and every other architecture
_CLONE_ARGS_SIZE = 80  # CLONE_ARGS_SIZE_VER1: with set_tid
_SET_TID_SIZE_OFFSET = 72
_TOO_MANY_LEVELS = 1000  # more pid namespaces than can be nested
_SOFT_DIRTY_BIT = 55  # of an entry of /proc/PID/pagemap

_UPGRADE = "use a kernel >= 5.5 and let no seccomp filter forbid it"


def check() -> list[Finding]:
    return [
        *(_memory_access(), _pidfd(), _set_tid(), _checkpoint_restore(), _soft_dirty()),
        *(io_uring(), freezer()),
    ]


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


def io_uring(proc: Path = Path("/proc")) -> Finding:
    """io_uring_disabled: 0: everybody may; 1: one group may; 2: nobody (sysctl/kernel.rst)."""
    name = "io_uring"
    try:
        value = int((proc / "sys/kernel/io_uring_disabled").read_text())
    except (OSError, ValueError):
        value = 0
    if value == 2:
        return ok(name, "switched off")
    return note(
        name,
        "programs may use it, and CRIU cannot dump one that does",
        "sysctl kernel.io_uring_disabled=2 (Linux 6.6), or a seccomp profile without io_uring_setup",
    )


def freezer(proc: Path = Path("/proc"), groups: Path = Path("/sys/fs/cgroup")) -> Finding:
    """Runtimes have CRIU stop a container through its control group."""
    name = "cgroup freezer"
    if (groups / "cgroup.controllers").exists():  # part of every cgroup v2 since Linux 5.2
        if any(groups.glob("*/cgroup.freeze")):
            return ok(name, "of cgroup v2")
        return note(name, "no control group has one that can be seen here")
    for line in (proc / "cgroups").read_text().splitlines():
        words = line.split()
        if words and words[0] == "freezer" and words[-1] == "1":
            return ok(name, "of cgroup v1")
    return problem(name, "not in this kernel", "use a kernel with CONFIG_CGROUP_FREEZER=y")
