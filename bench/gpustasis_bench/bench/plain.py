"""The two ends of what GPU memory can hold: noise, and nothing. They need no extra."""

from __future__ import annotations

import random

from gpustasis_bench.bench.content import ContentWriter

_TENSOR = 64 << 20  # bytes; segments of a size that models have
_BLOCK = 4 << 20


def fill_random(writer: ContentWriter, size: int, seed: int) -> None:
    """Bytes that nothing makes smaller."""
    numbers = random.Random(seed)
    for index, count in enumerate(_tensors(size)):
        blocks = [numbers.randbytes(min(_BLOCK, count - at)) for at in range(0, count, _BLOCK)]
        writer.add(f"noise {index}", "random bytes", b"".join(blocks))


def fill_zeros(writer: ContentWriter, size: int, seed: int) -> None:
    """Memory that was allocated and never written."""
    for index, count in enumerate(_tensors(size)):
        writer.add_untouched(f"nothing {index}", "untouched", count)


def _tensors(size: int) -> list[int]:
    whole, rest = divmod(size, _TENSOR)
    return [_TENSOR] * whole + ([rest] if rest else [])
