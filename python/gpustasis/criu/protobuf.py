"""The little of protobuf's wire format that reading CRIU's images takes.

Source: Protocol Buffers documentation, "Encoding".
"""

from __future__ import annotations

from collections.abc import Iterator

_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5  # wire types
_FIXED_SIZES = {_FIXED_64: 8, _FIXED_32: 4}


def fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Each field's number and value, as they stand: an int or what has a length, as bytes.

    Fields of fixed width are left out. Raises ValueError or IndexError if the message is damaged.
    """
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        number, kind = key >> 3, key & 7
        if kind in _FIXED_SIZES:
            offset += _FIXED_SIZES[kind]
            continue
        value, offset = _varint(message, offset)
        if kind == _VARINT:
            yield number, value
        elif kind == _LENGTH:
            if value > len(message) - offset:
                raise ValueError(f"field {number} does not end in its message")
            yield number, message[offset : offset + value]
            offset += value
        else:
            raise ValueError(f"field {number} has wire type {kind}")


def packed(raw: bytes) -> Iterator[int]:
    """The numbers of a packed repeated field. Raises as fields."""
    offset = 0
    while offset < len(raw):
        value, offset = _varint(raw, offset)
        yield value


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("a number is longer than 64 bits")
