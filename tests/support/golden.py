# SPDX-License-Identifier: Apache-2.0
"""What the golden files under tests/data/golden hold. They are made once for each version of the
format and never again: a change of one is a change of the format.

`python -m support.golden DIR MEMORY_DIR ALIKE_DIR PACKED_DIR` (with tests/ on PYTHONPATH) writes
them.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from gpustasis._core import (
    GpuSource,
    ImageInfo,
    Manifest,
    ManifestTask,
    MemoryKind,
    ParentIndex,
    ProcessState,
    Region,
    TaskGpu,
    image_name,
    link_parent,
    write_image,
    write_manifest,
    write_pack,
)
from support.image_samples import CHECKPOINT_ID, GPU, PAGE, Memory, info_of, noise

SMALLEST: Memory = [(0x10000, bytes(PAGE))]
# Of one byte over and over: every version of LZ4 stores that alike.
MIXTURE: Memory = [
    (0x7F0000000000, b"\x07" * (2 * PAGE) + noise(3 * PAGE) + bytes(2 * PAGE)),
    (0x7F0000007000, b"\xff" * PAGE),
]
# Of one process: its CPU memory at a first and at a second checkpoint, and its GPU memory.
CPU_FIRST: Memory = [(0x55D000000000, noise(2 * PAGE, "heap")), (0x7F2000000000, b"\x05" * PAGE)]
CPU_SECOND: Memory = [
    (0x55D000000000, noise(2 * PAGE, "heap") + bytes(PAGE)),
    (0x7F2000000000, b"\x06" * PAGE),
]
GPU_MEMORY: Memory = [(0x7F0000000000, noise(PAGE, "staged"))]
# Of two processes: the second has all that the first has, elsewhere, and a page of its own.
ALIKE_FIRST: Memory = [(0x7F0000000000, noise(3 * PAGE, "weights") + bytes(PAGE) + b"\x09" * PAGE)]
ALIKE_SECOND: Memory = [
    (0x7F5000000000, noise(3 * PAGE, "weights") + noise(PAGE, "own") + b"\x09" * PAGE)
]
# By name; and modes.
PACKED_FILES = {
    "core-1.img": (noise(100, "core"), 0o644),
    "empty.img": (b"", 0o600),
    "inventory.img": (b"inventory", 0o640),
    "pages-1.img": (noise(PAGE, "pages") + bytes(PAGE) + b"\x09" * 10, 0o600),
}
PACKED_NS = 1_700_000_000_123_456_789
FIRST_ID, SECOND_ID = noise(16, "first"), noise(16, "second")


def smallest_info() -> ImageInfo:
    return ImageInfo(
        pid=1, checkpoint_id=CHECKPOINT_ID, chunk_size=PAGE, regions=[Region(0x10000, PAGE)]
    )


def write_golden(directory: Path) -> None:
    """Write all files of the newest version into `directory`."""
    write_image(directory / "smallest.img", smallest_info(), SMALLEST, alignment=1)
    digest = write_image(
        directory / "mixture.img", info_of(MIXTURE, chunk_size=2 * PAGE), MIXTURE
    ).digest
    manifest = Manifest(
        checkpoint_id=CHECKPOINT_ID,
        driver_api_version=13000,
        driver_version="580.95.05",
        gpus=[GPU],
        tasks=[
            ManifestTask(pid=7, state_before=ProcessState.CHECKPOINTED),
            ManifestTask(
                pid=4242,
                externalized=True,
                digest=digest,
                gpu_source=GpuSource.NVML,
                gpus=[TaskGpu(0, 12 << 20)],
            ),
        ],
    )
    write_manifest(directory, manifest)


def write_golden_memory(directory: Path) -> None:
    """Write two checkpoints with images of CPU memory, the second built on the first."""
    first, second = directory / "first", directory / "second"
    first.mkdir()
    second.mkdir()
    _write_checkpoint(first, FIRST_ID, {MemoryKind.CPU: CPU_FIRST})
    link_parent(second, first)
    both = {MemoryKind.GPU: GPU_MEMORY, MemoryKind.CPU: CPU_SECOND}
    _write_checkpoint(second, SECOND_ID, both, ParentIndex.read(first))


def write_golden_alike(directory: Path) -> None:
    """Write a checkpoint with an image that refers to another one of the same."""
    index = ParentIndex(PAGE)
    tasks = []
    for pid, kind, runs in ((7, MemoryKind.GPU, ALIKE_FIRST), (9, MemoryKind.CPU, ALIKE_SECOND)):
        info = ImageInfo(
            pid=pid,
            checkpoint_id=FIRST_ID,
            kind=kind,
            comm="train",
            chunk_size=PAGE,
            regions=[Region(address, len(content)) for address, content in runs],
        )
        path = directory / image_name(pid, kind)
        digest = write_image(path, info, runs, alignment=64, parent=index).digest
        tasks.append(ManifestTask(pid=pid, externalized=True, digest=digest, kind=kind))
        index.add(directory, FIRST_ID, tasks[-1])
    write_manifest(directory, Manifest(checkpoint_id=FIRST_ID, tasks=tasks))


def _write_checkpoint(
    directory: Path,
    checkpoint_id: bytes,
    memory: dict[MemoryKind, Memory],
    parent: ParentIndex | None = None,
) -> None:
    tasks = []
    for kind, runs in memory.items():
        info = ImageInfo(
            pid=4242,
            checkpoint_id=checkpoint_id,
            kind=kind,
            comm="train",
            chunk_size=PAGE,
            regions=[Region(address, len(content)) for address, content in runs],
        )
        path = directory / image_name(4242, kind)
        digest = write_image(path, info, runs, alignment=64, parent=parent).digest
        tasks.append(ManifestTask(pid=4242, externalized=True, digest=digest, kind=kind))
    manifest = Manifest(
        checkpoint_id=checkpoint_id,
        tasks=tasks,
        parent_id=bytes(16) if parent is None else FIRST_ID,
        chain_length=0 if parent is None else 1,
    )
    write_manifest(directory, manifest)


def write_golden_packed(directory: Path) -> None:
    """Write a checkpoint whose images of CRIU's are packed, without those that lie in the open."""
    with TemporaryDirectory() as made:
        for name, (content, mode) in PACKED_FILES.items():
            path = Path(made) / name
            path.write_bytes(content)
            path.chmod(mode)
            os.utime(path, ns=(PACKED_NS, PACKED_NS))
        digest = write_pack(made, list(PACKED_FILES), directory, checkpoint_id=CHECKPOINT_ID)
    write_manifest(directory, Manifest(checkpoint_id=CHECKPOINT_ID, pack=digest))


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
    write_golden_memory(Path(sys.argv[2]))
    write_golden_alike(Path(sys.argv[3]))
    write_golden_packed(Path(sys.argv[4]))
