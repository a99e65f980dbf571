# SPDX-License-Identifier: Apache-2.0
"""A directory tree as it is, to compare before with after; and death at a chosen moment."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable
from pathlib import Path

Tree = dict[str, tuple[object, ...]]

# Audit events (Python's "Audit events table") at which files change; death comes just before one.
_CHANGES = {
    *("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "os.chown"),
    *("os.utime", "os.setxattr", "ctypes.dlsym"),  # the last: an exchange of two names
}


def tree(root: Path) -> Tree:
    """Type, mode, owner, contents and, for files, time of last change of all that is in root."""
    found: Tree = {}
    for path in sorted(root.rglob("*")):
        status = path.lstat()
        fact: object = None
        if stat.S_ISREG(status.st_mode):
            fact = (path.read_bytes(), status.st_mtime_ns)
        elif stat.S_ISLNK(status.st_mode):
            fact = os.readlink(path)
        name = str(path.relative_to(root))
        found[name] = (oct(status.st_mode), status.st_uid, status.st_gid, fact)
    return found


def contents(root: Path) -> Tree:
    """As tree(), without times, and without the record: it names no times of ours either."""
    return {
        name: (*facts[:3], facts[3][0] if isinstance(facts[3], tuple) else facts[3])
        for name, facts in tree(root).items()
    }


def copy(root: Path, to: Path) -> Path:
    """With modes and times."""
    return Path(shutil.copytree(root, to, symlinks=True))


def dies_at(turn: int, work: Callable[[], object]) -> bool:
    """Do the work in a process of its own that is killed before its turn-th change to files.

    Returns False if it got to its end without. Fails if it ended in another way.
    """
    pid = os.fork()
    if pid == 0:
        try:
            _die_at(turn)
            work()
        except BaseException as exc:  # noqa: BLE001  # the process must end here
            os.write(2, f"{type(exc).__name__}: {exc}\n".encode())
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(pid, 0)
    if os.WIFSIGNALED(status):
        assert os.WTERMSIG(status) == signal.SIGKILL
        return True
    assert os.WEXITSTATUS(status) == 0
    return False


def _die_at(turn: int) -> None:
    left = turn

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal left
        if event not in _CHANGES:
            return
        if event == "open":
            flags = arguments[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR):
                return
        left -= 1
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
