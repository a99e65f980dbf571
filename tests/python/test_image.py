# SPDX-License-Identifier: Apache-2.0
"""Images through Python: writing, reading, restoring into a process."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from gpustasis._core import (
    CorruptDataError,
    Encoding,
    GpuSource,
    ImageReader,
    Manifest,
    ManifestTask,
    TaskGpu,
    UnsupportedDataError,
    image_name,
    read_manifest,
    write_image,
    write_manifest,
)
from support.image_samples import (
    CHECKPOINT_ID,
    GPU,
    PAGE,
    Sample,
    info_of,
    mixture,
    noise,
    samples,
)

# tmp_path is the same for all examples of a test: each writes the same file again.
ONE_DIRECTORY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)


@ONE_DIRECTORY
@given(sample=samples())
def test_what_was_written_is_read(tmp_path: Path, sample: Sample) -> None:
    path = tmp_path / "a.img"
    result = write_image(
        path, sample.info, sample.memory, compress=sample.compress, alignment=sample.alignment
    )
    image = ImageReader.open(path)
    assert image.info == sample.info
    assert (image.digest, image.totals) == (result.digest, result.totals)
    assert image.file_size == result.file_size == path.stat().st_size
    image.verify()
    content = dict(sample.memory)
    for index in range(len(image)):
        chunk = image.chunk(index)
        base = max(address for address in content if address <= chunk.address)
        expected = content[base][chunk.address - base :][: chunk.plain_size]
        assert image.read_chunk(index) == expected
        into = bytearray(chunk.plain_size)
        image.read_chunk_into(index, into)
        assert into == expected


@ONE_DIRECTORY
@given(sample=samples())
def test_the_file_does_not_depend_on_threads(tmp_path: Path, sample: Sample) -> None:
    written = set()
    for threads in (1, 2, 7):
        path = tmp_path / "a.img"
        write_image(path, sample.info, sample.memory, threads=threads)
        written.add(path.read_bytes())
    assert len(written) == 1


def test_memory_comes_back_into_a_process(tmp_path: Path) -> None:
    with mmap.mmap(-1, 64 * PAGE) as memory:
        memory[:] = noise(32 * PAGE) + bytes(16 * PAGE) + b"\x05" * (16 * PAGE)
        before = bytes(memory)
        view = (ctypes.c_char * len(memory)).from_buffer(memory)
        address = ctypes.addressof(view)
        path = tmp_path / "a.img"
        write_image(path, info_of([(address, before)], chunk_size=2 * PAGE), [(address, view)])
        ctypes.memset(address, 0xAA, len(memory))
        done: list[int] = []
        ImageReader.open(path).restore_to_process(os.getpid(), progress=done.append)
        assert bytes(memory) == before
        assert done[-1] == len(before)
        del view


def test_memory_that_cannot_be_written_is_an_os_error(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    write_image(path, info_of([(PAGE, b"x" * PAGE)]), [(PAGE, b"x" * PAGE)])
    with pytest.raises(OSError, match=r"chunk 0 at 0x1000: cannot write memory of pid"):
        ImageReader.open(path).restore_to_process(os.getpid())


def test_what_progress_raises_stops_the_work(tmp_path: Path) -> None:
    memory = [(PAGE, bytes(64 << 20))]
    write_image(tmp_path / "a.img", info_of(memory, chunk_size=65536), memory)

    def stop(done: int) -> None:
        raise KeyError(done)

    with pytest.raises(KeyError):
        ImageReader.open(tmp_path / "a.img").verify(4, stop)


def test_other_threads_run_while_an_image_is_verified(tmp_path: Path) -> None:
    memory = [(PAGE, noise(1 << 20) * 64)]
    write_image(tmp_path / "a.img", info_of(memory, chunk_size=65536), memory)
    image = ImageReader.open(tmp_path / "a.img")
    turns, is_verifying = 0, False

    def verify() -> None:
        nonlocal is_verifying
        is_verifying = True
        for _ in range(1000):  # this thread may get no processor while one goes on
            if turns > 100:
                break
            image.verify()
        is_verifying = False

    worker = threading.Thread(target=verify)
    before = sys.getswitchinterval()
    sys.setswitchinterval(3600)  # nobody has to give up the interpreter: whoever does so wants to
    try:
        worker.start()
        while worker.is_alive():
            turns += is_verifying
            time.sleep(0)
    finally:
        sys.setswitchinterval(before)
    worker.join()
    assert turns > 100


def test_missing_memory_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no buffer"):
        write_image(tmp_path / "a.img", info_of(mixture()), mixture()[:1])
    assert list(tmp_path.iterdir()) == []


def test_errors_have_types_and_name_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.img"
    with pytest.raises(OSError, match=r"a\.img"):
        ImageReader.open(path)
    path.write_bytes(b"no image" * 100)
    with pytest.raises(CorruptDataError, match=r"a\.img"):
        ImageReader.open(path)
    with pytest.raises(ValueError, match="16 bytes"):
        Manifest(checkpoint_id=b"short")
    memory = mixture()
    write_image(path, info_of(memory), memory)
    image = ImageReader.open(path)
    with pytest.raises(ValueError, match="no chunk 7"):
        image.chunk(7)
    assert [image.chunk(i).encoding for i in range(7)] == [
        Encoding.LZ4,
        Encoding.RAW,
        Encoding.ZERO,
        Encoding.ZERO,
        Encoding.LZ4,
        Encoding.LZ4,
        Encoding.RAW,
    ]


def test_text_that_is_not_utf8_survives(tmp_path: Path) -> None:
    memory = mixture()
    comm = b"\xff\xfe\x80".decode("utf-8", "surrogateescape")
    info = info_of(memory)
    odd = type(info)(pid=1, checkpoint_id=CHECKPOINT_ID, comm=comm, regions=info.regions)
    write_image(tmp_path / "a.img", odd, memory)
    assert ImageReader.open(tmp_path / "a.img").info.comm == comm


def test_a_manifest_comes_back(tmp_path: Path) -> None:
    manifest = Manifest(
        checkpoint_id=CHECKPOINT_ID,
        driver_api_version=12080,
        gpus=[GPU],
        tasks=[
            ManifestTask(pid=3, gpu_source=GpuSource.DEVICE_FILES, gpus=[TaskGpu(0)]),
            ManifestTask(
                pid=4,
                externalized=True,
                digest=b"d" * 16,
                gpu_source=GpuSource.NVML,
                gpus=[TaskGpu(0, 1 << 20)],
            ),
        ],
    )
    write_manifest(tmp_path, manifest)
    assert read_manifest(tmp_path) == manifest
    assert image_name(4) == "gpustasis-4.img"
    assert not issubclass(UnsupportedDataError, OSError)
    with pytest.raises(OSError, match="gpustasis-manifest"):
        read_manifest(tmp_path / "..")
