# SPDX-License-Identifier: Apache-2.0
"""Room for what comes: what a file takes, and whether that is there."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Protocol

from gpustasis.errors import PeerError
from gpustasis.peers.config import Config
from gpustasis.text import mib

# Of one checkpoint. CRIU writes some eight files for a process and one for each further thread, so
# a tree of 1000 processes has a third of it; the inodes of a whole file system would be more.
MAX_FILES = 1 << 15
PAGE = 4096
_STEP = 1 << 20  # bytes that are asked for at once, while files come that are small
_SPARE = 16  # one in so many inodes stays free, for others in the same file system


def charge(size: int) -> int:
    """What a file of `size` bytes takes: whole pages, and one for its inode and its name. Counted
    by their lengths alone, 65,536 files of a byte would be 64 KiB, and take 256 MiB."""
    return -(-size // PAGE) * PAGE + PAGE


class Charges:
    """What the directories of `above` take with their files. Those do not change, so each directory
    is counted once; one that another has taken the place of is counted again. Called by one thread
    at a time."""

    def __init__(self, above: Path, counts: Callable[[str], bool]) -> None:
        self._above = above
        self._counts = counts
        self._known: dict[tuple[str, int, int], int] = {}

    def total(self) -> int:
        """Of those whose names `counts`. Raises OSError."""
        known: dict[tuple[str, int, int], int] = {}
        for name in filter(self._counts, os.listdir(self._above)):
            path = self._above / name
            with suppress(FileNotFoundError):  # removed meanwhile
                found = path.stat(follow_symlinks=False)
                key = (name, found.st_ino, found.st_mtime_ns)
                known[key] = self._known.get(key) or charge_of(path)
        self._known = known
        return sum(known.values())


def charge_of(directory: Path) -> int:
    """What a directory takes with its files. Raises OSError."""
    with os.scandir(directory) as entries:
        sizes = [entry.stat(follow_symlinks=False).st_size for entry in entries]
    return PAGE + sum(map(charge, sizes))


class Charge(Protocol):
    """Who counts what comes, while it comes."""

    def file(self, size: int) -> object:
        """Called before a file of that length is made. Raises PeerError if it has no room."""

    def came(self, size: int) -> object:
        """Called when so many bytes of it are there."""


class OnDisk:
    """Looks whether there is room in `directory` for what a fetch brings. place: for messages."""

    def __init__(self, directory: Path, place: Path) -> None:
        self._directory = directory
        self._place = place

    def file(self, size: int) -> None:
        require_inode(self._directory, self._place)
        require_free_bytes(self._directory, charge(size), self._place)

    def came(self, size: int) -> None:
        pass


def require_free_bytes(directory: Path, size: int, place: Path) -> None:
    """Raise PeerError unless its file system has that much room. OSError. place: what is to be made
    there."""
    status = os.statvfs(directory)
    free = status.f_bavail * status.f_frsize
    if size > free:
        raise PeerError(f"there is no room for {place}: {mib(free)} are free, it needs {mib(size)}")


def require_inode(directory: Path, place: Path) -> None:
    """Raise PeerError unless one more file can be made, and others in the same file system can
    make theirs. OSError."""
    status = os.statvfs(directory)  # f_files is 0 where there is no limit
    if status.f_files and status.f_favail <= status.f_files // _SPARE:
        raise PeerError(f"there is no room for more files in {place}")


class Room:
    """Of the copies in one directory, whole and coming. used: bytes that the whole ones take. Calls
    come from several threads."""

    def __init__(self, config: Config, used: Callable[[], int]) -> None:
        self._config = config
        self._used = used
        self._lock = threading.Lock()
        self._promises: set[Promise] = set()

    @contextmanager
    def promised(self, size: int) -> Iterator[Promise]:
        """In the block there is room for a copy whose files have so many bytes. Raises PeerError if
        there is none."""
        promise = Promise(self)
        promise.need(PAGE + size)  # its directory
        try:
            yield promise
        finally:
            with self._lock:
                self._promises.discard(promise)

    def extend(self, promise: Promise, needs: int) -> None:
        """Promise so many bytes in all, and some more if there are any. Raises PeerError."""
        with self._lock:
            room = self._for(promise)
            if needs > room:
                raise PeerError(
                    f"there is room for {mib(max(0, room))} more in the memory of this node, and "
                    f"the copy needs {mib(needs)}"
                )
            promise.granted = min(room, needs + _STEP)
            self._promises.add(promise)

    def _for(self, promise: Promise) -> int:
        """Bytes that this copy can have, with those of it that are there already."""
        memory = _meminfo()
        status = os.statvfs(self._config.directory)
        others = self._promises - {promise}
        limit = (self._config.limit or memory["MemTotal"] // 2) - self._used()
        free = min(
            status.f_bavail * status.f_frsize,
            memory["MemAvailable"] - self._config.reserve,
        )
        return min(
            limit - sum(one.granted for one in others),
            free + promise.there - sum(max(0, one.granted - one.there) for one in others),
        )

    def require_inode(self) -> None:
        """Raise PeerError unless one more file can be made."""
        require_inode(self._config.directory, self._config.directory)


class Promise:
    """Of one copy that comes; each call from the thread that takes it. granted: bytes that it may
    take; there: those that it takes already."""

    def __init__(self, room: Room) -> None:
        self._room = room
        self._needs = 0
        self.granted = 0
        self.there = 0

    def need(self, more: int) -> None:
        """So many bytes more. Raises PeerError if they have no room."""
        self._needs += more
        if self._needs > self.granted:
            self._room.extend(self, self._needs)

    def file(self, size: int) -> None:
        """A file that comes: its bytes were promised, what it takes beyond them was not, for its
        sender says only how many bytes all files have."""
        self._room.require_inode()
        self.need(charge(size) - size)
        self.there += charge(size) - size

    def came(self, size: int) -> None:
        self.there += size


def _meminfo() -> dict[str, int]:
    """In bytes. Source: proc(5), /proc/meminfo."""
    found = {}
    for line in Path("/proc/meminfo").read_text().splitlines():
        name, _, rest = line.partition(":")
        words = rest.split()
        if words[1:] == ["kB"]:
            found[name] = int(words[0]) << 10
    return found
