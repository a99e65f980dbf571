"""One block of 512 bytes of a tar archive, and the extended headers between such blocks.

Sources: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Interchange Format"; GNU tar manual,
"Basic Tar Format" (long names, base-256 numbers).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass

BLOCK_SIZE = 512
_FIELDS = struct.Struct("<100s8s8s8s12s12s8s1s100s6s2s32s32s8s8s155s12s")
_CHECKSUM = slice(148, 156)
_USTAR, _GNU = b"ustar\0", b"ustar "
_MAX_NUMBER = (1 << 63) - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TarHeader:
    """The fields as they stand: names are bytes, times whole seconds, sizes bytes."""

    name: bytes
    mode: int
    size: int
    mtime: int
    type: bytes
    target: bytes


def parse_header(block: bytes) -> TarHeader:
    """Take a block apart. Raises ValueError that says what is wrong with it."""
    (name, mode, _, _, size, mtime, checksum, kind, target, magic, *_, prefix, _) = _FIELDS.unpack(
        block
    )
    counted = sum(block) - sum(block[_CHECKSUM]) + 8 * ord(" ")
    if number(checksum) != counted:
        raise ValueError("its checksum is wrong")
    if magic not in (_USTAR, _GNU):
        raise ValueError(f"its magic is {magic!r}, which is neither POSIX's nor GNU's")
    whole = _text(name)
    if magic == _USTAR and _text(prefix):
        whole = _text(prefix) + b"/" + whole
    return TarHeader(
        name=whole,
        mode=number(mode) & 0o7777,
        size=number(size),
        mtime=number(mtime),
        type=kind,
        target=_text(target),
    )


def number(field: bytes) -> int:
    """An octal number, or GNU's base-256 one. Raises ValueError."""
    if field[0] & 0x80:
        value = int.from_bytes(bytes([field[0] & 0x7F]) + field[1:], "big")
        if field[0] & 0x40 or value > _MAX_NUMBER:
            raise ValueError(f"a number is negative or too large: {field!r}")
        return value
    digits = field.rstrip(b" \0").lstrip(b" ")
    if not digits:
        return 0
    if not all(byte in b"01234567" for byte in digits):
        raise ValueError(f"a number is not octal: {field!r}")
    return int(digits, 8)


def pax_records(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    """Keyword and value of each record of a pax header. Raises ValueError."""
    offset = 0
    while offset < len(raw):
        end = raw.find(b" ", offset, offset + 20)
        digits = raw[offset:end] if end > 0 else b""
        if not digits.isdigit():
            raise ValueError(f"a pax record at byte {offset} has no length")
        record = raw[end + 1 : offset + int(digits)]
        if len(record) != int(digits) - (end + 1 - offset) or not record.endswith(b"\n"):
            raise ValueError(f"a pax record at byte {offset} is not as long as it says")
        keyword, equals, value = record[:-1].partition(b"=")
        if not equals or not keyword:
            raise ValueError(f"a pax record at byte {offset} has no keyword")
        yield keyword, value
        offset += int(digits)


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]
