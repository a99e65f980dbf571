# SPDX-License-Identifier: Apache-2.0
"""`python3 -m gpustasis_bench.contents WORKLOAD BYTES SEED FOLDER FINAL`: make one content.

At least BYTES of GPU memory, into the existing folder FOLDER, which will lie at the path FINAL.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from gpustasis_bench.contents.layout import ContentWriter

_TENSOR = 64 << 20  # bytes; segments of a size that models have
_BLOCK = 4 << 20


def fill_random(writer: ContentWriter, size: int, seed: int) -> None:
    """Bytes that nothing makes smaller."""
    numbers = random.Random(seed)  # noqa: S311 - contents, no secret
    for index, count in enumerate(_tensors(size)):
        blocks = [numbers.randbytes(min(_BLOCK, count - at)) for at in range(0, count, _BLOCK)]
        writer.add(f"noise {index}", "random bytes", b"".join(blocks))


def fill_zeros(writer: ContentWriter, size: int, _seed: int) -> None:
    """Memory that was allocated and never written."""
    for index, count in enumerate(_tensors(size)):
        writer.add_untouched(f"nothing {index}", "untouched", count)


def _tensors(size: int) -> list[int]:
    whole, rest = divmod(size, _TENSOR)
    return [_TENSOR] * whole + ([rest] if rest else [])


def main(workload: str, size: int, seed: int, folder: Path, final: Path) -> None:
    """Raises OSError if it cannot be written, ImportError if PyTorch is missing and needed."""
    writer = ContentWriter(folder)
    match workload:
        case "random":
            fill_random(writer, size, seed)
        case "zeros":
            fill_zeros(writer, size, seed)
        case "qlora":
            from gpustasis_bench.contents.qlora import fill_qlora

            fill_qlora(writer, size, seed)
        case "inference" | "finetuning":
            from gpustasis_bench.contents.pretraining import fill_finetuning, fill_inference

            fill = fill_inference if workload == "inference" else fill_finetuning
            fill(writer, size, seed)
        case _:
            raise ValueError(f"no workload is named {workload!r}")
    writer.finish(workload, final)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]), Path(sys.argv[5]))
