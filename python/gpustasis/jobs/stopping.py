# SPDX-License-Identifier: Apache-2.0
"""Ending a rank's tasks, all of them, and knowing that they have ended."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

from gpustasis.errors import CheckpointError, JobError
from gpustasis.recovery import GUARDIAN_COMM, WORKER_COMM
from gpustasis.streaming.tree import Tree

_ENDED_S = 60.0
_POLL_S = 0.02
_HELPERS = frozenset((WORKER_COMM, GUARDIAN_COMM))
_SESSION, _START_TIME = 3, 19  # fields of /proc/PID/stat after the name: 6 and 22 of proc(5)


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


def stop(root: int, start_time: int) -> None:
    """End the tasks of this root, which may have ended itself; 0: there is none. Raises JobError
    if some do not end.

    What it has left behind is found by its session, which a rank has of its own; and among the
    children of this process, which gets what its tasks leave.
    """
    deadline = time.monotonic() + _ENDED_S
    while found := _left(root, start_time):
        for pid in found:
            with suppress(CheckpointError):  # it has ended
                killed(Tree(pid)).close()
        reap()
        if time.monotonic() > deadline:
            raise JobError(f"process {found[0]} does not end: of the tasks below {root}")
        time.sleep(_POLL_S)
    reap()


def _left(root: int, start_time: int) -> list[int]:
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
        if fields[0] in "ZX" or comm in _HELPERS:
            continue
        started = int(fields[_START_TIME])
        if pid == root:
            is_ours = started == start_time
        else:
            in_session = root > 0 and int(fields[_SESSION]) == root and started >= start_time
            is_ours = pid in own or (in_session and not _is_another(root, start_time))
        if is_ours:
            found.append(pid)
    return found


def _is_another(root: int, start_time: int) -> bool:
    """Whether that number is another process's by now, and so is its session."""
    try:
        stat = Path(f"/proc/{root}/stat").read_text(errors="replace")
    except OSError:
        return False
    return int(stat.rpartition(")")[2].split()[_START_TIME]) != start_time


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
