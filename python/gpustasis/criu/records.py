"""How CRIU frames its images: two magic words, then records of a 32-bit length and a message.

Source: CRIU criu/include/magic.h and images/*.proto (v1.1 images); all numbers little-endian.
"""

from __future__ import annotations

from collections.abc import Iterator

_COMMON_MAGIC = 0x54564319  # "1.1 images"
_RECORD_LIMIT = 1 << 20  # bytes; a task with 100,000 threads stays below it


def has_magic(raw: bytes, magic: int) -> bool:
    """Whether `raw` begins as an image of that kind."""
    return _word(raw, 0) == _COMMON_MAGIC and _word(raw, 4) == magic


def records(raw: bytes) -> Iterator[bytes]:
    """The messages of a whole image. Raises ValueError if it is cut short."""
    offset = 8
    while offset < len(raw):
        size = _word(raw, offset)
        record = raw[offset + 4 : offset + 4 + size]
        if size > _RECORD_LIMIT or len(record) != size:
            raise ValueError(f"a record at byte {offset} does not end in the file")
        yield record
        offset += 4 + size


def _word(raw: bytes, offset: int) -> int:
    return int.from_bytes(raw[offset : offset + 4], "little")
