# SPDX-License-Identifier: Apache-2.0
"""What this machine can do at best: bandwidths, measured in the same run as everything else."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import shutil
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from gpustasis._core import DEFAULT_CHUNK_SIZE, encode_chunk, hash128
from gpustasis_bench.bench import storage
from gpustasis_bench.bench.medium import Medium
from gpustasis_bench.bench.storage import timed_together
from gpustasis_bench.errors import BenchError

THREADS = (1, 2)
_BLOCK = 4 << 20
_REPEATS = 3  # the best counts: a limit is what can be reached
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, which Python's mmap has no name for

_libc = ctypes.CDLL(None, use_errno=True)


class _Span(ctypes.Structure):  # struct iovec
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


_SPANS = ctypes.POINTER(_Span)
_NUMBER = ctypes.c_ulong
for _call in (_libc.process_vm_readv, _libc.process_vm_writev):
    _call.restype = ctypes.c_ssize_t
    _call.argtypes = (ctypes.c_int, _SPANS, _NUMBER, _SPANS, _NUMBER, _NUMBER)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)

# Prints where its memory begins, then waits to be killed. Its bytes are all there if the last word
# says so; else they are given by whoever writes them first.
_HOLDER = """
import ctypes, mmap, sys, time
size = int(sys.argv[1])
area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
if sys.argv[2] == "present":
    block = b"\\x5a" * (1 << 20)
    for at in range(0, size, len(block)):
        area[at : at + len(block)] = block
print(ctypes.addressof(ctypes.c_char.from_buffer(area)), flush=True)
time.sleep(3600)
"""


def measure_limits(media: list[Medium], size: int) -> dict[str, Any]:
    """Bytes per second, the best of three times. `size`: bytes that are moved by each measurement.

    Keys: memcpy, read_process, write_process, drop, lz4_random, xxh3 (the last three: one thread),
    and under each medium's name write (with fdatasync), read (cold), and of a tmpfs rewrite (over
    pages that are there, as the plugin writes an image into an arena that has them); by number of
    threads: "1" and "2", of a disk "8" only. For write and read each thread of a tmpfs has a file
    of its own: to one file one thread at a time can write(2). For rewrite all have one file.

    Raises BenchError, also where a tmpfs cannot be written through a mapping (before Linux 5.14).
    """
    found: dict[str, Any] = {"memcpy": _by_threads(size, _copy_memory)}
    found["read_process"] = _by_threads(size, _read_process)
    found["write_process"] = _by_threads(size, _write_process)
    found["drop"] = {"1": round(size / min(_drop(size) for _ in range(_REPEATS)))}
    chunk = os.urandom(DEFAULT_CHUNK_SIZE)
    found["lz4_random"] = _rate_of(lambda: encode_chunk(chunk), len(chunk))
    found["xxh3"] = _rate_of(lambda: hash128(chunk), len(chunk))
    for medium in media:
        if medium.in_memory:
            found[medium.name] = {
                "write": _by_threads(size, functools.partial(_write, medium)),
                "rewrite": _by_threads(size, functools.partial(_rewrite, medium)),
                "read": _by_threads(size, functools.partial(_read, medium)),
            }
        else:
            found[medium.name] = _of_disk(medium, size)
    return found


def _by_threads(size: int, move: Callable[[int, int], float]) -> dict[str, int]:
    """move(bytes of each thread, threads) -> seconds."""
    found = {}
    for threads in THREADS:
        part = size // threads // _BLOCK * _BLOCK or _BLOCK
        seconds = min(move(part, threads) for _ in range(_REPEATS))
        found[str(threads)] = round(part * threads / seconds)
    return found


def _rate_of(work: Callable[[], object], size: int) -> int:
    rates = []
    for _ in range(_REPEATS):
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < 0.2:
            work()
            count += 1
        rates.append(size * count / (time.perf_counter() - begin))
    return round(max(rates))


def _copy_memory(part: int, threads: int) -> float:
    """From memory to memory, both present, larger than a cache."""
    areas = [(_area(part), _area(part)) for _ in range(threads)]

    def work(index: int) -> None:
        to, source = areas[index]
        ctypes.memmove(_address(to), _address(source), part)

    return timed_together(threads, work)


def _area(size: int) -> mmap.mmap:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    block = b"\x5a" * _BLOCK
    for at in range(0, size, _BLOCK):
        area[at : at + _BLOCK] = block[: min(_BLOCK, size - at)]
    return area


def _address(area: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(area))


def _read_process(part: int, threads: int) -> float:
    """Another process's present memory into a buffer that stays in the cache, as a dump does."""
    return _transfer(_libc.process_vm_readv, part, threads, "present")


def _write_process(part: int, threads: int) -> float:
    """Into another process's memory that is not there yet, as a restore does."""
    return _transfer(_libc.process_vm_writev, part, threads, "absent")


def _drop(size: int) -> float:
    """Give the pages of memory back, which the thread of a task does at the end of its dump."""
    with _area(size) as area:
        begin = time.perf_counter()
        area.madvise(mmap.MADV_DONTNEED)
        return time.perf_counter() - begin


def _transfer(call: Callable[..., int], part: int, threads: int, pages: str) -> float:
    step = DEFAULT_CHUNK_SIZE
    reader, writer = os.pipe()
    words = [sys.executable, "-c", _HOLDER, str(part * threads), pages]
    pid = os.posix_spawn(
        words[0], words, os.environ, file_actions=[(os.POSIX_SPAWN_DUP2, writer, 1)]
    )
    os.close(writer)
    try:
        with os.fdopen(reader) as told:
            line = told.readline()
        if not line:
            raise BenchError("the process whose memory was to be read ended at once")
        base = int(line)

        def work(index: int) -> None:
            buffer = _area(step)
            local = _Span(_address(buffer), step)
            for at in range(base + index * part, base + (index + 1) * part, step):
                remote = _Span(at, step)
                if call(pid, ctypes.byref(local), 1, ctypes.byref(remote), 1, 0) != step:
                    raise OSError(ctypes.get_errno(), "memory of another process")

        return timed_together(threads, work)
    finally:
        os.kill(pid, 9)
        os.waitpid(pid, 0)


def _of_disk(medium: Medium, size: int) -> dict[str, dict[str, int]]:
    """As the disk is measured in the rounds of the downtime, so that the two can be compared."""
    write = min(medium.write_seconds(size) for _ in range(_REPEATS))
    folder = medium.folder / "limit"
    folder.mkdir()
    try:
        paths = [folder / str(number) for number in range(storage.THREADS)]
        storage.write_direct(paths, size, medium.filesystem)
        read = min(medium.read_seconds([folder]) for _ in range(_REPEATS))
    finally:
        shutil.rmtree(folder)
    threads = str(storage.THREADS)
    return {"write": {threads: round(size / write)}, "read": {threads: round(size / read)}}


def _write(medium: Medium, part: int, threads: int) -> float:
    """New files of a tmpfs, one of each thread, and fdatasync."""
    medium.settle()
    with _files(medium, threads) as paths:
        return _put(paths, part)


def _rewrite(medium: Medium, part: int, threads: int) -> float:
    """One file of a tmpfs that has all of its pages, each thread a part of its own, out of memory
    that stays in the cache. As the plugin does it: one thread at a time has the file's lock for
    write(2), and is the fastest; who comes meanwhile has the pages mapped and copies to them. The
    plugin maps each chunk by itself, which costs it no more; here the interpreter would be in the
    way of that."""
    with _files(medium, 1) as (path,):
        _put([path], part * threads)
        handle = os.open(path, os.O_RDWR)
        try:
            return _timed_rewrite(handle, part, threads)
        finally:
            os.close(handle)


def _timed_rewrite(handle: int, part: int, threads: int) -> float:
    step = DEFAULT_CHUNK_SIZE
    turn = threading.Lock()
    sources = [_noise(step) for _ in range(threads)]

    def work(index: int) -> None:
        source, begin = sources[index], index * part
        # Through ctypes: Python's own madvise() keeps all other threads from their work.
        with mmap.mmap(handle, part, offset=begin) as pages:
            address = _address(pages)
            for at in range(0, part, step):
                if turn.acquire(blocking=False):
                    try:
                        written = os.pwrite(handle, source, begin + at)
                    finally:
                        turn.release()
                    if written != step:
                        raise BenchError("a file of a tmpfs: not all was written")
                    continue
                if _libc.madvise(address + at, step, _POPULATE_WRITE) != 0:
                    reason = os.strerror(ctypes.get_errno())
                    raise BenchError(f"madvise(MADV_POPULATE_WRITE) of a file of a tmpfs: {reason}")
                ctypes.memmove(address + at, _address(source), step)

    return timed_together(threads, work)


def _read(medium: Medium, part: int, threads: int) -> float:
    """Files of a tmpfs, one of each thread."""
    with _files(medium, threads) as paths:
        _put(paths, part)

        def work(index: int) -> None:
            buffer = bytearray(DEFAULT_CHUNK_SIZE)
            handle = os.open(paths[index], os.O_RDONLY)
            try:
                while os.readv(handle, [buffer]) > 0:
                    pass
            finally:
                os.close(handle)

        return timed_together(threads, work)


def _put(paths: list[Path], size: int) -> float:
    """Seconds to write so many bytes of noise to each of these new files, side by side."""
    noise = os.urandom(DEFAULT_CHUNK_SIZE)

    def work(index: int) -> None:
        handle = os.open(paths[index], os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            for _ in range(0, size, len(noise)):
                if os.write(handle, noise) != len(noise):
                    raise BenchError(f"{paths[index]}: not all was written")
            os.fdatasync(handle)
        finally:
            os.close(handle)

    return timed_together(len(paths), work)


def _noise(size: int) -> mmap.mmap:
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    area[:] = os.urandom(size)
    return area


@contextlib.contextmanager
def _files(medium: Medium, count: int) -> Iterator[list[Path]]:
    """Names of so many files, which are removed afterwards."""
    paths = [medium.folder / f"limit-{index}" for index in range(count)]
    try:
        yield paths
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
