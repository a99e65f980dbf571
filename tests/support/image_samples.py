# SPDX-License-Identifier: Apache-2.0
"""Images and checkpoints for tests, and hypothesis strategies for arbitrary ones."""

from __future__ import annotations

import hashlib
import itertools
from dataclasses import dataclass
from pathlib import Path

from hypothesis import strategies as st

from gpustasis._core import (
    GpuInfo,
    GpuSource,
    ImageInfo,
    Manifest,
    ManifestTask,
    MemoryKind,
    ProcessState,
    Region,
    RegionKind,
    TaskGpu,
    image_name,
    write_image,
    write_manifest,
)

PAGE = 4096
CHECKPOINT_ID = bytes(range(16))
BOOT_ID = bytes.fromhex("6ba7b8109dad11d180b400c04fd430c8")
GPU = GpuInfo(bytes.fromhex("a5" * 16), "NVIDIA H200", 150_754_820_096)

Memory = list[tuple[int, bytes]]


def noise(size: int, seed: str = "") -> bytes:
    """Bytes that nothing compresses, the same on every machine and with every version of Python."""
    return hashlib.shake_256(seed.encode()).digest(size)


def info_of(memory: Memory, pid: int = 4242, chunk_size: int = PAGE) -> ImageInfo:
    """Every field set to something of its own."""
    return ImageInfo(
        pid=pid,
        checkpoint_id=CHECKPOINT_ID,
        start_time=123_456_789,
        boot_id=BOOT_ID,
        comm="train",
        state_before=ProcessState.LOCKED,
        driver_api_version=13000,
        driver_version="580.95.05",
        gpus=[GPU],
        chunk_size=chunk_size,
        regions=[Region(address, len(content)) for address, content in memory],
    )


def mixture() -> Memory:
    """Two regions with chunks of every encoding."""
    return [
        (0x7F0000000000, b"\x07" * PAGE + noise(PAGE) + bytes(2 * PAGE)),
        (0x7F0000100000, b"\x01\x02" * PAGE + noise(PAGE, "b")),
    ]


def make_checkpoint(
    directory: Path,
    images: dict[int, Memory],
    *,
    staged_in_criu: tuple[int, ...] = (),
    alignment: int = 64,
) -> Manifest:
    """Write an image for each pid of `images`, and the manifest that names them."""
    sources = [(GpuSource.UNKNOWN, []), (GpuSource.DEVICE_FILES, [TaskGpu(0)])]
    tasks = [
        ManifestTask(pid=pid, gpu_source=source, gpus=gpus)
        for pid, (source, gpus) in zip(staged_in_criu, itertools.cycle(sources), strict=False)
    ]
    for pid, memory in images.items():
        path = directory / image_name(pid)
        result = write_image(path, info_of(memory, pid), memory, alignment=alignment)
        tasks.append(
            ManifestTask(
                pid=pid,
                externalized=True,
                digest=result.digest,
                gpu_source=GpuSource.NVML,
                gpus=[TaskGpu(0, 24 << 20)],
            )
        )
    tasks.sort(key=lambda task: task.pid)
    manifest = Manifest(
        checkpoint_id=CHECKPOINT_ID,
        driver_api_version=13000,
        driver_version="580.95.05",
        gpus=[GPU],
        tasks=tasks,
    )
    write_manifest(directory, manifest)
    return manifest


@dataclass(frozen=True)
class Sample:
    """An arbitrary image to be: what write_image takes."""

    info: ImageInfo
    memory: Memory
    alignment: int
    compress: bool


def _page(kind: int, seed: int) -> bytes:
    if kind == 0:
        return bytes(PAGE)
    if kind == 1:
        return bytes([1 + seed % 255]) * PAGE
    if kind == 2:
        return noise(PAGE, str(seed))
    return noise(seed * 16 % PAGE, str(seed)).ljust(PAGE, b"\x55")


_text = st.text(st.characters(codec="ascii", exclude_characters="\0"), max_size=15)
_pages = st.lists(st.builds(_page, st.integers(0, 3), st.integers(0, 255)), min_size=1, max_size=6)
_gpus = st.builds(
    GpuInfo,
    uuid=st.binary(min_size=16, max_size=16),
    name=_text,
    memory_size=st.integers(0, 2**64 - 1),
)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    """Any image with up to 24 pages of memory."""
    memory: Memory = []
    regions: list[Region] = []
    address = PAGE * draw(st.integers(0, 2**44))
    for pages in draw(st.lists(_pages, max_size=4)):
        content = b"".join(pages)
        memory.append((address, content))
        kind = draw(st.sampled_from([RegionKind.PRIVATE_ANONYMOUS, RegionKind.SHARED_ANONYMOUS]))
        regions.append(Region(address, len(content), draw(st.integers(0, 7)), kind))
        address += len(content) + PAGE * draw(st.integers(0, 3))
    info = ImageInfo(
        pid=draw(st.integers(1, 2**31 - 1)),
        checkpoint_id=draw(st.binary(min_size=16, max_size=16)),
        start_time=draw(st.integers(0, 2**64 - 1)),
        boot_id=draw(st.binary(min_size=16, max_size=16)),
        comm=draw(_text),
        state_before=draw(st.sampled_from(list(ProcessState.__members__.values()))),
        driver_api_version=draw(st.integers(0, 2**32 - 1)),
        driver_version=draw(_text),
        gpus=draw(st.lists(_gpus, max_size=3)),
        chunk_size=draw(st.sampled_from([4096, 8192, 16384])),
        regions=regions,
        kind=draw(st.sampled_from(list(MemoryKind.__members__.values()))),
    )
    return Sample(info, memory, 2 ** draw(st.integers(0, 12)), draw(st.booleans()))
