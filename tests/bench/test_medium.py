# SPDX-License-Identifier: Apache-2.0
"""A medium: cold files are cold, and what it does alone is all of it."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.test_bench import MIB
from gpustasis_bench.bench import storage
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


def test_limits_of_a_tmpfs_tell_new_pages_from_those_that_are_there() -> None:
    folder = TMPFS / f"gpustasis-test-{os.getpid()}"
    folder.mkdir()
    in_memory = Medium(name="tmpfs", folder=folder, filesystem="tmpfs")
    try:
        written = _of_process("wchar")
        found = measure_limits([in_memory], 16 * MIB)["tmpfs"]
        assert set(found) == {"write", "rewrite", "read"}
        assert all(set(rates) == {"1", "2"} for rates in found.values())
        # By one thread and by two, three times each: once, twice, and once to be read.
        assert _of_process("wchar") - written >= 2 * 3 * (1 + 2 + 1) * 16 * MIB
        assert list(folder.iterdir()) == []
    finally:
        shutil.rmtree(folder)
