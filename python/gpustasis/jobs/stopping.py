# SPDX-License-Identifier: Apache-2.0
"""Ending a rank's tasks, all of them, and knowing that they have ended."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import struct
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType

from gpustasis.errors import CheckpointError, JobError
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.streaming.tree import Tree
from gpustasis.task import comm_of, read_task

_ENDED_S = 60.0
_HEARD_S = 5.0  # whoever else is a parent may never ask
_POLL_S = 0.02
_UNCLAIMED_S = 5.0  # somebody who waits for a child looks more often
_HELPERS = frozenset((WORKER_COMM, GUARDIAN_COMM))
_NONE: Mapping[int, int] = MappingProxyType({})
# Fields of /proc/PID/stat after the name: 6, 20, 22 and 52 of proc(5).
_SESSION, _THREADS, _START_TIME, _EXIT_CODE = 3, 17, 19, 49
# linux/pidfd.h: PIDFD_GET_INFO, of struct pidfd_info in its first version; PIDFD_INFO_EXIT.
_GET_INFO, _INFO, _INFO_EXIT = 0xC040FF0B, struct.Struct("=Q52xi"), 1 << 3


def killed(tree: Tree) -> Tree:
    """The tree, which may run and have made others since it was walked; all of it is killed."""
    while True:
        tree.kill(signal.SIGSTOP)  # no process makes another from here on
        try:
            again = Tree(tree.root)
        except CheckpointError:  # the root has ended
            break
        is_all = set(again.pids) <= set(tree.pids)
        tree.close()
        tree = again
        if is_all:
            break
    tree.kill()
    return tree


def stop(root: int, start_time: int, known: Mapping[int, int] = _NONE) -> bool:
    """End the tasks of this root, which may have ended itself; 0: there is none. Whether there were
    some. Raises JobError if some do not end.

    What it has left behind is found by its session, which a rank has of its own; among the children
    of this process, which gets what its tasks leave; and in `known` (kin.py).
    """
    deadline = time.monotonic() + _ENDED_S
    ended = {root} if root else set()
    were_there = False
    while found := _left(root, start_time, known):
        were_there = True
        ended.update(found)
        for pid in found:
            with suppress(CheckpointError):  # it has ended
                killed(Tree(pid)).close()
        reap()
        if time.monotonic() > deadline:
            raise JobError(f"process {found[0]} does not end: of the tasks below {root}")
        time.sleep(_POLL_S)
    reap()  # what had ended by itself, or was made by a restore that was aborted
    # A restore needs their pids, which are free when their parents have heard of their ends.
    deadline = time.monotonic() + _HEARD_S
    while any(_is_zombie(pid) for pid in ended) and time.monotonic() < deadline:
        reap()
        time.sleep(_POLL_S)
    return were_there


def _left(root: int, start_time: int, known: Mapping[int, int]) -> list[int]:
    found = []
    own = set(children())
    for entry in filter(str.isdigit, os.listdir("/proc")):
        pid = int(entry)
        try:
            place = Path("/proc") / entry
            fields = (place / "stat").read_text(errors="replace").rpartition(")")[2].split()
            comm = (place / "comm").read_text(errors="replace").rstrip("\n")
        except OSError:
            continue
        has_ended = fields[0] in "ZX" and int(fields[_THREADS]) < 2  # else its first thread has
        if has_ended or comm in _HELPERS:
            continue
        started = int(fields[_START_TIME])
        if pid == root:
            is_ours = started == start_time
        else:
            in_session = root > 0 and int(fields[_SESSION]) == root and started >= start_time
            is_ours = pid in own or (in_session and not _is_another(root, start_time))
            is_ours = is_ours or known.get(pid) == started
        if is_ours:
            found.append(pid)
    return found


def _is_zombie(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] in "ZX"


def _is_another(root: int, start_time: int) -> bool:
    """Whether that number is another process's by now, and so is its session."""
    try:
        stat = Path(f"/proc/{root}/stat").read_text(errors="replace")
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[_START_TIME]) != start_time


def _zombie(pid: int, start_time: int) -> list[str]:
    """Its fields; none if it runs, or was reaped."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return []
    fields = stat.rpartition(")")[2].split()
    return fields if fields[0] == "Z" and int(fields[_START_TIME]) == start_time else []


def is_unheard(pid: int, start_time: int) -> bool:
    """Whether it has ended, and its parent has not asked how."""
    return bool(_zombie(pid, start_time))


def status_of(pid: int, start_time: int, descriptor: int) -> int | None:
    """How a process has ended that is no child of this one, as os.waitstatus_to_exitcode has it.
    descriptor: its pidfd. None: it cannot be told, as before Linux 6.15 of one that was reaped."""
    if fields := _zombie(pid, start_time):
        return os.waitstatus_to_exitcode(int(fields[_EXIT_CODE]))
    info = bytearray(_INFO.pack(_INFO_EXIT, 0))
    try:
        fcntl.ioctl(descriptor, _GET_INFO, info)
    except OSError:
        return None
    mask, code = _INFO.unpack(info)
    return os.waitstatus_to_exitcode(code) if mask & _INFO_EXIT else None


def tree_pids(root: int) -> tuple[int, ...]:
    """Of a process and all below it; none if it has ended."""
    try:
        tree = Tree(root)
    except CheckpointError:
        return ()
    try:
        return tree.pids
    finally:
        tree.close()


def children() -> list[int]:
    """Of this process."""
    found: list[int] = []
    for thread in os.listdir("/proc/self/task"):
        with suppress(OSError), open(f"/proc/self/task/{thread}/children") as file:
            found += map(int, file.read().split())
    return found


def reap() -> None:
    """Of the tasks, and whatever else has come to this process, nothing is left that has ended: a
    restore needs their pids. No program of ours is being waited for any more."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def strays(root: int) -> list[int]:
    """Live processes that have come to this one because what started them has ended: they are not
    below the root any more, and a dump would miss them. No program of ours runs now."""
    found = []
    for pid in children():
        with suppress(CheckpointError, OSError):  # it has ended
            if pid != root and comm_of(pid) not in _HELPERS and read_task(pid).pid == pid:
                found.append(pid)
    return found


class Root:
    """The root of the tasks by its pidfd, and when it was started: one that was restored has the
    pid that it had."""

    def __init__(self) -> None:
        self._held, self._descriptor = (0, 0), -1

    @property
    def is_held(self) -> bool:
        """Else another process may have its number."""
        return self._descriptor >= 0

    def has_ended(self, pid: int, start_time: int, lives: Callable[[], bool]) -> bool:
        """Whether all threads of that one have. lives: whether the first one has not."""
        if self._held != (pid, start_time):
            self.close()
            try:
                self._descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                return True
            self._held = pid, start_time
            if not (lives() or is_unheard(pid, start_time) or pid in children()):
                self.close()
                return True  # another process has its number
        return bool(select.select([self._descriptor], [], [], 0)[0])

    def status(self) -> int | None:
        """As status_of has it, of one that has ended."""
        return status_of(*self._held, self._descriptor) if self.is_held else None

    def close(self) -> None:
        if self.is_held:
            os.close(self._descriptor)
        self._held, self._descriptor = (0, 0), -1


class Orphans:
    """Processes that have come to this one and ended, as this process is their subreaper: whoever
    does not wait for them runs out of pids."""

    def __init__(self) -> None:
        self._since: dict[int, float] = {}  # when they were first seen to have ended

    def reap(self, root: int) -> None:
        """But for the root: the plugin's helpers at once, others once nobody else has waited for
        them for a while. A program of ours, such as criu, has somebody who does."""
        now, since = time.monotonic(), self._since
        self._since = {}
        for pid in children():
            with suppress(OSError):
                ended = os.WEXITED | os.WNOHANG | os.WNOWAIT
                if pid == root or os.waitid(os.P_PID, pid, ended) is None:
                    continue
                if comm_of(pid) in _HELPERS or now > since.get(pid, now) + _UNCLAIMED_S:
                    os.waitpid(pid, os.WNOHANG)
                else:
                    self._since[pid] = since.get(pid, now)
