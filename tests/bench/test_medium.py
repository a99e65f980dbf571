# SPDX-License-Identifier: Apache-2.0
"""A medium: cold files are cold, and what it does alone is all of it."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench.test_bench import MIB
from gpustasis._core import DEFAULT_CHUNK_SIZE
from gpustasis_bench.bench import limits, storage
from gpustasis_bench.bench.limits import measure_limits
from gpustasis_bench.bench.medium import Medium, filesystem_of, resident_share
from gpustasis_bench.errors import BenchError

BLOCK = 4096
BESIDE = 16 * MIB  # of which this process may read or write other things meanwhile
TMPFS = Path("/dev/shm")


@pytest.fixture
def disk(repository: Path) -> Iterator[Medium]:
    """In the checkout, for the folder of the tests may lie in memory."""
    with tempfile.TemporaryDirectory(prefix="medium-", dir=repository / "build") as name:
        folder = Path(name)
        found = Medium(name="disk", folder=folder, filesystem=filesystem_of(folder))
        assert not found.in_memory
        yield found


def test_cold_files_are_cold(medium: Medium) -> None:
    path = medium.folder / "sub" / "file"
    path.parent.mkdir()
    path.write_bytes(os.urandom(4 * MIB))
    assert resident_share([path]) == 1.0
    how = medium.cool([path.parent])
    if medium.in_memory:
        assert (how, resident_share([path])) == ("in memory", 1.0)
    else:
        assert how.startswith("POSIX_FADV_DONTNEED")
        assert resident_share([path]) <= 0.01


def test_a_disk_reads_every_byte_past_the_page_cache(disk: Medium) -> None:
    """Also of a file that is larger than all threads take at once, and of sizes that are odd."""
    images = disk.folder / "images"
    (images / "sub").mkdir(parents=True)
    sizes = {"large": 67 * MIB + 5, "sub/small": 3, "even": 4 * MIB, "empty": 0}
    files = [images / name for name in sizes]
    for path, size in zip(files, sizes.values(), strict=True):
        path.write_bytes(os.urandom(size))
    disk.cool([images])
    cached, before = resident_share(files), _of_process("read_bytes")
    assert disk.read_seconds([images]) > 0
    grown = _of_process("read_bytes") - before
    assert sum(sizes.values()) <= grown <= sum(sizes.values()) + BESIDE
    assert resident_share(files) <= cached


def test_a_disk_writes_every_byte_and_keeps_no_file(disk: Medium) -> None:
    size = 37 * MIB + 5
    before = _of_process("write_bytes")
    assert disk.write_seconds(size) > 0
    grown = _of_process("write_bytes") - before
    assert size <= grown <= size + BESIDE
    assert list(disk.folder.iterdir()) == []


@pytest.mark.parametrize("size", [37 * MIB + 5, 3 * BLOCK, 1])
def test_what_a_disk_is_given_is_noise_past_the_page_cache(disk: Medium, size: int) -> None:
    paths = [disk.folder / str(number) for number in range(3)]
    storage.write_direct(paths, size, disk.filesystem)
    written = [path for path in paths if path.exists()]
    assert sum(path.stat().st_size for path in written) == size
    assert resident_share(written) == 0.0
    blocks = [
        data[at : at + BLOCK]
        for data in (path.read_bytes() for path in written)
        for at in range(0, len(data), BLOCK)
    ]
    assert len(set(blocks)) == len(blocks)
    # 4096 bytes of noise have nearly all 256 values.
    assert min((len(set(block)) for block in blocks if len(block) == BLOCK), default=256) > 200


def test_a_file_of_the_name_is_not_written_over(disk: Medium) -> None:
    path = disk.folder / "mine"
    path.write_bytes(b"mine")
    with pytest.raises(FileExistsError):
        storage.write_direct([path], MIB, disk.filesystem)
    assert path.read_bytes() == b"mine"


def test_a_file_system_without_direct_io_is_named() -> None:
    path = Path("/sys/kernel/uevent_seqnum")  # a size of 4096, and no O_DIRECT
    with pytest.raises(BenchError, match=r"uevent_seqnum: its file system, sysfs, refuses direct"):
        storage.read_direct([path], "sysfs")


def test_a_disk_that_refuses_direct_io_only_when_it_is_written_is_named(
    disk: Medium, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(handle: int, buffers: list[memoryview], at: int) -> int:
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))

    monkeypatch.setattr(os, "pwritev", refuse)
    with pytest.raises(BenchError, match=rf"{disk.filesystem}, refuses direct I/O"):
        disk.write_seconds(MIB)
    assert list(disk.folder.iterdir()) == []


def test_buffers_of_direct_io_are_there_and_may_lie_on_huge_pages() -> None:
    buffer = storage.huge_buffer(4 * MIB)
    address = ctypes.addressof(ctypes.c_char.from_buffer(buffer))
    assert (len(buffer), address % (2 * MIB)) == (4 * MIB, 0)
    present, flags = 0, []
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        key, *values = line.split()
        if not key.endswith(":"):
            begin, end = (int(each, 16) for each in key.split("-"))
            ours = begin <= address < end
        elif ours and key == "Rss:":
            present = int(values[0]) << 10
        elif ours and key == "VmFlags:":
            flags = values
    assert present >= 4 * MIB
    assert "hg" in flags or not Path("/sys/kernel/mm/transparent_hugepage").exists()


def test_a_tmpfs_is_read_and_written_through_memory() -> None:
    """All bytes are read, of a file of several parts too, and as many are written as are asked for,
    of which nothing stays."""
    folder = TMPFS / f"gpustasis-test-{os.getpid()}"
    images = folder / "images"
    images.mkdir(parents=True)
    in_memory = Medium(name="tmpfs", folder=folder, filesystem="tmpfs")
    try:
        for name, size in (("large", (64 << 20) + 5), ("small", 3)):
            (images / name).write_bytes(bytes(size))
        read, written = _of_process("rchar"), _of_process("wchar")
        assert in_memory.read_seconds([images]) > 0
        assert _of_process("rchar") - read >= (64 << 20) + 8
        assert in_memory.write_seconds(32 << 20) > 0
        assert _of_process("wchar") - written >= 32 << 20
        assert [path.name for path in folder.iterdir()] == ["images"]
    finally:
        shutil.rmtree(folder)


def test_limits_of_a_disk_are_of_eight_threads(disk: Medium) -> None:
    read, written = _of_process("read_bytes"), _of_process("write_bytes")
    found = measure_limits([disk], 16 * MIB)
    assert {kind: set(rates) for kind, rates in found["disk"].items()} == {
        "write": {"8"},
        "read": {"8"},
    }
    assert min(found["disk"]["write"]["8"], found["disk"]["read"]["8"]) > 0
    assert set(found["memcpy"]) == {"1", "2"}
    # Three times each; what is read was written before.
    assert _of_process("read_bytes") - read >= 3 * 16 * MIB
    assert _of_process("write_bytes") - written >= 4 * 16 * MIB
    assert list(disk.folder.iterdir()) == []


def _of_process(figure: str) -> int:
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{figure}:"))


@pytest.fixture
def in_memory() -> Iterator[Medium]:
    folder = TMPFS / f"gpustasis-test-{os.getpid()}"
    folder.mkdir()
    try:
        yield Medium(name="tmpfs", folder=folder, filesystem="tmpfs")
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)


def test_limits_of_a_tmpfs_are_of_one_thread_and_of_two(in_memory: Medium) -> None:
    written = _of_process("wchar")
    found = measure_limits([in_memory], 16 * MIB)["tmpfs"]
    assert set(found) == {"write", "rewrite", "read"}
    assert all(set(rates) == {"1", "2"} for rates in found.values())
    # By one thread and by two, three times each: once for each of the three, at least.
    assert _of_process("wchar") - written >= 2 * 3 * 3 * 16 * MIB


@dataclass
class Pass:
    """Files before and after threads worked side by side."""

    threads: int
    before: dict[str, bytes]
    after: dict[str, bytes]


@pytest.fixture
def passes(in_memory: Medium, monkeypatch: pytest.MonkeyPatch) -> list[Pass]:
    """Each takes one second more than the one before."""
    found: list[Pass] = []

    def content() -> dict[str, bytes]:
        files = {path.name: path for path in in_memory.folder.iterdir()}
        for path in files.values():
            assert path.stat().st_blocks * 512 == path.stat().st_size  # no page is missing
        return {name: path.read_bytes() for name, path in files.items()}

    def observed(threads: int, work: Callable[[int], None]) -> float:
        before = content()
        storage.timed_together(threads, work)
        found.append(Pass(threads, before, content()))
        return float(len(found))

    monkeypatch.setattr(limits, "timed_together", observed)
    return found


@pytest.mark.parametrize("threads", [1, 2])
def test_pages_that_are_there_are_written_by_all_threads_in_one_file(
    in_memory: Medium, passes: list[Pass], threads: int
) -> None:
    """The time is the second pass's: the first has made the pages."""
    part = 4 * MIB
    assert limits._rewrite(in_memory, part, threads) == 2.0
    made, again = passes
    assert (made.threads, made.before) == (1, {})
    assert again.threads == threads
    (before,) = again.before.values()
    (after,) = again.after.values()
    assert again.before.keys() == again.after.keys()
    assert len(before) == len(after) == threads * part
    step = DEFAULT_CHUNK_SIZE
    blocks = [(before[at : at + step], after[at : at + step]) for at in range(0, len(after), step)]
    assert all(old != new for old, new in blocks)
    # Each thread has a buffer of its own, and a part.
    parts = [{new for _, new in blocks[at : at + 16]} for at in range(0, len(blocks), 16)]
    assert [len(each) for each in parts] == [1] * threads
    assert len(set().union(*parts)) == threads


def test_new_pages_are_written_by_each_thread_in_a_file_of_its_own(
    in_memory: Medium, passes: list[Pass]
) -> None:
    assert limits._write(in_memory, 4 * MIB, 2) == 1.0
    (only,) = passes
    assert (only.threads, only.before) == (2, {})
    assert [len(each) for each in only.after.values()] == [4 * MIB] * 2


@pytest.mark.parametrize("kind", ["write", "read"])
def test_a_tmpfs_is_written_and_read_in_blocks_as_large_as_chunks(
    in_memory: Medium, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    sizes: set[int] = set()
    write, readv = os.write, os.readv

    def seen_write(handle: int, data: bytes) -> int:
        sizes.add(len(data))
        return write(handle, data)

    def seen_readv(handle: int, buffers: list[bytearray]) -> int:
        sizes.update(map(len, buffers))
        return readv(handle, buffers)

    monkeypatch.setattr(os, "write", seen_write)
    monkeypatch.setattr(os, "readv", seen_readv)
    measure = {"write": limits._write, "read": limits._read}[kind]
    assert measure(in_memory, 4 * MIB, 2) > 0
    assert sizes == {DEFAULT_CHUNK_SIZE}


@pytest.mark.parametrize("refused", [False, True])
def test_who_does_not_have_the_files_lock_copies_to_mapped_pages(
    in_memory: Medium, monkeypatch: pytest.MonkeyPatch, refused: bool
) -> None:
    """One thread keeps the lock until the other has asked for a page."""
    asked, advices = threading.Event(), []
    madvise, pwrite = limits._libc.madvise, os.pwrite

    def slow_pwrite(handle: int, data: bytes, at: int) -> int:
        assert asked.wait(30)
        return pwrite(handle, data, at)

    def seen_madvise(address: int, size: int, advice: int) -> int:
        advices.append((size, advice))
        asked.set()
        # What the kernel does not know it refuses, as a kernel before 5.14 does.
        return int(madvise(address, size, 9999 if refused else advice))

    monkeypatch.setattr(os, "pwrite", slow_pwrite)
    monkeypatch.setattr(limits._libc, "madvise", seen_madvise)
    if refused:
        with pytest.raises(BenchError, match=r"MADV_POPULATE_WRITE\).*: Invalid argument"):
            limits._rewrite(in_memory, 4 * MIB, 2)
    else:
        assert limits._rewrite(in_memory, 4 * MIB, 2) > 0
    assert set(advices) == {(DEFAULT_CHUNK_SIZE, 23)}
