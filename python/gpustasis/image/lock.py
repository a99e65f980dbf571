# SPDX-License-Identifier: Apache-2.0
"""Locks on image directories: shared for who reads a chain, exclusive for who removes.

docs/format.md, "Links". A lock is a flock(2): the kernel drops it when its holder dies.
"""

from __future__ import annotations

import fcntl
import os
import resource
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Self

from gpustasis.errors import ImageError


class DirectoryLock:
    """A lock on a directory, held until closed. Make one with `share` or `try_exclude`."""

    def __init__(self, directory: Path, fd: int) -> None:
        self.directory = directory
        self._fd = fd

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


def share(directory: Path) -> DirectoryLock:
    """A shared lock; waits for who removes the directory. Raises ImageError if it is gone then."""
    lock = _open(directory)
    fcntl.flock(lock._fd, fcntl.LOCK_SH)
    if not _still_there(lock):
        lock.close()
        raise ImageError(f"{directory} was removed or renamed a moment ago")
    return lock


def try_exclude(directory: Path) -> DirectoryLock | None:
    """An exclusive lock; None if somebody holds one, or the directory is another by now.

    Raises ImageError if it cannot be opened.
    """
    lock = _open(directory)
    try:
        fcntl.flock(lock._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        lock.close()
        return None
    if not _still_there(lock):
        lock.close()
        return None
    return lock


@contextmanager
def shared(directories: Iterable[Path]) -> Iterator[None]:
    """Hold a shared lock on each. Raises as share."""
    with ExitStack() as held:
        for directory in directories:
            held.enter_context(share(directory))
        yield


def allow_many_files() -> None:
    """Let this process open as many files as it may: a chain has a directory and more per link."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _open(directory: Path) -> DirectoryLock:
    try:
        fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as exc:
        raise ImageError(f"cannot open {directory}: {exc.strerror}") from exc
    return DirectoryLock(directory, fd)


def _still_there(lock: DirectoryLock) -> bool:
    """Whether what was locked is what is at the path: it may have been renamed meanwhile."""
    try:
        return os.path.samestat(os.fstat(lock._fd), os.stat(lock.directory))
    except FileNotFoundError:
        return False
