"""Text to train on: the sources of Python's standard library, which every machine has."""

from __future__ import annotations

import sysconfig
from collections.abc import Iterator
from pathlib import Path

from gpustasis_bench.bench.errors import BenchError

_WANTED = 4 << 20  # bytes


def read_corpus() -> bytes:
    """Up to 4 MiB of it, the same for the same Python. Raises BenchError if there is none."""
    library = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(library.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= _WANTED:
            break
    if len(text) < _WANTED // 16:
        raise BenchError(f"{library} holds too few sources to train on")
    return bytes(text[:_WANTED])


def batches(text: bytes, sequences: int, length: int) -> Iterator[list[bytes]]:
    """Without end: stretches of `length` + 1 bytes, one after the other, from the start again."""
    at = 0
    while True:
        batch = []
        for _ in range(sequences):
            if at + length + 1 > len(text):
                at = 0
            batch.append(text[at : at + length + 1])
            at += length
        yield batch
