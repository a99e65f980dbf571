# SPDX-License-Identifier: Apache-2.0
"""Where images lie while they are measured, and what the kernel remembers of them."""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gpustasis_bench.bench import storage
from gpustasis_bench.errors import BenchError

_DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_TOLERATED = 0.01  # of the pages of the images may stay in memory
_PAGE = mmap.PAGESIZE

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int),
    *(ctypes.c_int, ctypes.c_int, ctypes.c_long),
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_MAP_FAILED = ctypes.c_void_p(-1).value


@dataclass(frozen=True, slots=True, kw_only=True)
class Medium:
    """name: "tmpfs" or "disk". folder: an empty folder there, ours. filesystem: its type."""

    name: str
    folder: Path
    filesystem: str

    @property
    def in_memory(self) -> bool:
        return self.filesystem == "tmpfs"

    def settle(self) -> None:
        """Write out what earlier runs left to be written: it would slow down the next one."""
        os.sync()

    def sync(self) -> None:
        """Return when all files of the medium are on storage."""
        handle = os.open(self.folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            if _libc.syncfs(handle) != 0:
                raise OSError(ctypes.get_errno(), f"syncfs of {self.folder}")
        finally:
            os.close(handle)

    def cool(self, images: Iterable[Path]) -> str:
        """Make the next reader of these files read them from storage. Returns how it was done."""
        if self.in_memory:
            return "in memory"
        self.sync()
        files = [path for folder in images for path in folder.rglob("*") if path.is_file()]
        for path in files:
            _forget(path)
        if resident_share(files) <= _TOLERATED:
            return "POSIX_FADV_DONTNEED"
        try:
            _DROP_CACHES.write_text("1\n")
        except OSError as exc:
            raise BenchError(
                f"the images in {self.folder} stay in memory, and {_DROP_CACHES} may not be "
                f"written ({exc.strerror}): a restore from disk cannot be measured here"
            ) from exc
        share = resident_share(files)
        if share > _TOLERATED:
            raise BenchError(f"{share:.0%} of the images in {self.folder} stay in memory")
        return "POSIX_FADV_DONTNEED and drop_caches"

    def read_seconds(self, images: Iterable[Path]) -> float:
        """How long it takes to read these files from storage, and do no more. Raises BenchError."""
        folders = list(images)
        self.cool(folders)
        files = [path for folder in folders for path in folder.rglob("*") if path.is_file()]
        if self.in_memory:
            return storage.read_cached(files)
        return storage.read_direct(files, self.filesystem)

    def write_seconds(self, size: int) -> float:
        """How long it takes to bring `size` bytes of noise to storage, and do no more. Raises
        BenchError."""
        self.settle()
        paths = [self.folder / f"noise-{number}" for number in range(storage.THREADS)]
        try:
            if self.in_memory:
                return storage.write_cached(paths, size)
            return storage.write_direct(paths, size, self.filesystem)
        finally:
            for path in paths:
                path.unlink(missing_ok=True)


def open_medium(name: str, parent: Path, needed: int) -> Medium:
    """An empty folder of ours in `parent`, which has room for `needed` bytes. What killed runs
    left there is removed.

    Raises BenchError if it has not, or if "tmpfs" is not in memory.
    """
    remove_leftovers(parent, "gpustasis-bench-*-*")
    folder = (parent / f"gpustasis-bench-{os.getpid()}-{name}").absolute()
    try:
        folder.mkdir(parents=True, mode=0o700)
    except OSError as exc:
        raise BenchError(f"cannot make {folder}: {exc.strerror}") from exc
    medium = Medium(name=name, folder=folder, filesystem=filesystem_of(folder))
    problem = ""
    free = shutil.disk_usage(folder).free
    if free < needed:
        problem = f"{parent} has {free >> 20} MiB free, {needed >> 20} MiB are needed"
    elif name == "tmpfs" and not medium.in_memory:
        problem = f"{parent} is a {medium.filesystem}, no tmpfs; --tmpfs-dir names one"
    elif name == "disk" and medium.in_memory:
        problem = f"{parent} is a tmpfs; --disk-dir names a folder on a disk"
    if problem:
        folder.rmdir()
        raise BenchError(problem)
    return medium


def remove_leftovers(parent: Path, pattern: str) -> None:
    """Remove the folders of that name whose first number is no living process's."""
    for folder in parent.glob(pattern):
        owner = re.search(r"-(\d+)", folder.name)
        if owner is not None and not Path("/proc", owner[1]).exists():
            shutil.rmtree(folder, ignore_errors=True)


def filesystem_of(path: Path) -> str:
    """The type of the file system that `path` lies on: "ext4"."""
    best, kind = "", "unknown"
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, point, found, *_ = line.split()
        point = point.encode().decode("unicode_escape")
        if path.resolve().is_relative_to(point) and len(point) >= len(best):
            best, kind = point, found
    return kind


def resident_share(files: Iterable[Path]) -> float:
    """The share of these files' pages that is in memory, 0 to 1."""
    pages = resident = 0
    for path in files:
        size = path.stat().st_size
        if size == 0:
            continue
        count = -(-size // _PAGE)
        with path.open("rb") as file:
            address = _libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, file.fileno(), 0)
        if address == _MAP_FAILED:
            raise OSError(ctypes.get_errno(), f"mmap of {path}")
        states = ctypes.create_string_buffer(count)
        try:
            if _libc.mincore(address, size, states) != 0:
                raise OSError(ctypes.get_errno(), f"mincore of {path}")
        finally:
            _libc.munmap(address, size)
        pages += count
        resident += sum(byte & 1 for byte in states.raw)
    return resident / pages if pages else 0.0


def _forget(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fdatasync(handle)
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(handle)
