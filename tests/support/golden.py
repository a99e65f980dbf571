# SPDX-License-Identifier: Apache-2.0
"""What the golden files under tests/data/golden hold. They are made once for each version of the
format and never again: a change of one is a change of the format.

`python -m support.golden DIR` (with tests/ on PYTHONPATH) writes them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from gpustasis._core import (
    GpuSource,
    ImageInfo,
    Manifest,
    ManifestTask,
    ProcessState,
    Region,
    TaskGpu,
    write_image,
    write_manifest,
)
from support.image_samples import CHECKPOINT_ID, GPU, PAGE, Memory, info_of, noise

SMALLEST: Memory = [(0x10000, bytes(PAGE))]
# Of one byte over and over: every version of LZ4 stores that alike.
MIXTURE: Memory = [
    (0x7F0000000000, b"\x07" * (2 * PAGE) + noise(3 * PAGE) + bytes(2 * PAGE)),
    (0x7F0000007000, b"\xff" * PAGE),
]


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


if __name__ == "__main__":
    write_golden(Path(sys.argv[1]))
