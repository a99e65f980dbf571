# SPDX-License-Identifier: Apache-2.0
"""Reading and writing files as fast as the storage takes them, with nothing else to do.

On a disk past the page cache, as the plugin does it. What goes through the page cache also takes
memory for it, which a host that lends it to this machine has to find first. A device takes a
request of so many pieces of memory at most, so the buffers lie on huge pages.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import mmap
import operator
import os
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from gpustasis_bench.errors import BenchError

THREADS = 8
_REQUEST = 4 << 20
_ALIGNMENT = 4096  # of memory, offsets and sizes of direct I/O
_HUGE_PAGE = 2 << 20
_AHEAD = 64 << 20  # of a file, allocated before it is written
_CACHED_BLOCK = 1 << 20
_CACHED_PART = 64 * _CACHED_BLOCK  # of a file, read by one thread
_CACHED_STEP = 4099  # bytes, a prime


def read_direct(files: Sequence[Path], filesystem: str) -> float:
    """Seconds to read all bytes of these files. Raises BenchError, also if `filesystem`, on which
    they lie, refuses O_DIRECT."""
    requests = [
        (path, at, min(_REQUEST, size - at))
        for path, size in ((path, path.stat().st_size) for path in files)
        for at in range(0, size, _REQUEST)
    ]
    buffers = [huge_buffer(_REQUEST) for _ in range(THREADS)]

    def read(number: int) -> None:
        mine = requests[number::THREADS]  # of one large file, all read parts
        for path, parts in itertools.groupby(mine, key=operator.itemgetter(0)):
            with _opened(path, os.O_RDONLY, filesystem) as handle:
                for _, at, size in parts:
                    # A whole request also at the end, where less comes: sizes must be even.
                    if os.preadv(handle, [buffers[number]], at) < size:
                        raise BenchError(f"{path}: not all was read")

    return timed_together(THREADS, read)


def write_direct(paths: Sequence[Path], size: int, filesystem: str) -> float:
    """Seconds until `size` bytes of noise are on storage, an equal share in each of these new
    files, which stay. No 4 KiB of them are like others, should the storage look. Raises BenchError,
    also if `filesystem`, on which they lie, refuses O_DIRECT."""
    share = -(-size // (len(paths) * _ALIGNMENT)) * _ALIGNMENT
    buffers = [huge_buffer(_REQUEST) for _ in paths]
    for buffer in buffers:
        buffer[:] = os.urandom(_REQUEST)

    def write(number: int) -> None:
        begin = number * share
        length = min(share, size - begin)
        if length <= 0:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        with _opened(paths[number], flags, filesystem) as handle:
            for at in range(0, length, _REQUEST):
                if at % _AHEAD == 0:
                    _allocate(handle, at, min(_AHEAD, length - at))
                _number_blocks(buffers[number], (begin + at) // _ALIGNMENT)
                whole = -(-min(_REQUEST, length - at) // _ALIGNMENT) * _ALIGNMENT
                if os.pwritev(handle, [buffers[number][:whole]], at) != whole:
                    raise BenchError(f"{paths[number]}: not all was written")
            os.ftruncate(handle, length)
            os.fdatasync(handle)

    return timed_together(len(paths), write)


def read_cached(files: Sequence[Path]) -> float:
    """Seconds to read all bytes of these files through the page cache: for a tmpfs, which has
    nothing else."""
    parts = [(path, at) for path in files for at in range(0, path.stat().st_size, _CACHED_PART)]

    def read(number: int) -> None:
        buffer = bytearray(_CACHED_BLOCK)
        for path, begin in parts[number::THREADS]:
            with path.open("rb", buffering=0) as file:
                file.seek(begin)
                while file.tell() < begin + _CACHED_PART and file.readinto(buffer):
                    pass

    return timed_together(THREADS, read)


def write_cached(paths: Sequence[Path], size: int) -> float:
    """Seconds to write at least `size` bytes of noise to these new files, which stay, through the
    page cache: for a tmpfs. Raises BenchError."""
    noise = os.urandom(2 * _CACHED_BLOCK)
    blocks = -(-size // _CACHED_BLOCK // len(paths))

    def write(number: int) -> None:
        with paths[number].open("xb", buffering=0) as file:
            for block in range(blocks):
                at = (number * blocks + block) * _CACHED_STEP % _CACHED_BLOCK
                if file.write(memoryview(noise)[at : at + _CACHED_BLOCK]) != _CACHED_BLOCK:
                    raise BenchError(f"{paths[number]}: not all was written")
            os.fdatasync(file.fileno())

    return timed_together(len(paths), write)


def timed_together(threads: int, work: Callable[[int], None]) -> float:
    """Seconds until all of work(0) ... work(threads - 1) are done, side by side."""
    failures: list[Exception] = []

    def guarded(index: int) -> None:
        try:
            work(index)
        except (OSError, BenchError) as exc:  # told in the thread that waits
            failures.append(exc)

    workers = [threading.Thread(target=guarded, args=(index,)) for index in range(threads)]
    begin = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    seconds = time.perf_counter() - begin
    if failures:
        raise failures[0]
    return seconds


def huge_buffer(size: int) -> memoryview:
    """Memory of our own that begins with a huge page, on huge pages where the kernel gives them,
    and is all there."""
    area = mmap.mmap(-1, size + _HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # refused: it costs time, nothing else
        area.madvise(mmap.MADV_HUGEPAGE)
    first = -ctypes.addressof(ctypes.c_char.from_buffer(area)) % _HUGE_PAGE
    buffer = memoryview(area)[first : first + size]
    buffer[:] = bytes(size)
    return buffer


@contextlib.contextmanager
def _opened(path: Path, flags: int, filesystem: str) -> Iterator[int]:
    """A handle past the page cache. A file system may refuse that when a file is opened, or with
    the first request."""
    try:
        handle = os.open(path, flags | os.O_DIRECT | os.O_CLOEXEC, 0o600)
        try:
            yield handle
        finally:
            os.close(handle)
    except OSError as exc:
        if exc.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise
        raise BenchError(
            f"{path}: its file system, {filesystem}, refuses direct I/O ({exc.strerror}): what "
            "the disk does alone cannot be measured"
        ) from exc


def _allocate(handle: int, at: int, size: int) -> None:
    try:
        os.posix_fallocate(handle, at, size)
    except OSError as exc:
        # Where the file system cannot, the C library writes single bytes, which O_DIRECT refuses.
        if exc.errno not in {errno.EINVAL, errno.EOPNOTSUPP}:
            raise


def _number_blocks(buffer: memoryview, first: int) -> None:
    """Write its number, and no more, into each block of the buffer: new noise would take longer
    than a disk."""
    words = buffer.cast("Q")
    numbers = array("Q", range(first, first + len(buffer) // _ALIGNMENT))
    words[:: _ALIGNMENT // words.itemsize] = memoryview(numbers)
