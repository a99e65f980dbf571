"""CRIU's core-PID.img: the name of a process.

Source: CRIU images/core.proto and criu/include/magic.h (two magic words, a 32-bit length, one
protobuf message, little-endian).
"""

from __future__ import annotations

from pathlib import Path

from cudackpt.errors import ImageError

_MAGIC = bytes.fromhex("1943565447380555")  # v1.1 image, CORE_MAGIC
_SIZE_LIMIT = 1 << 20  # bytes
_TASK_CORE = 3  # core_entry.tc
_COMM = 6  # task_core_entry.comm
_FIXED_SIZES = {1: 8, 5: 4}  # wire types of fixed width


def read_comm(images: Path, pid: int) -> str:
    """The comm of process `pid`. Raises ImageError if its core image is missing or damaged."""
    path = images / f"core-{pid}.img"
    try:
        with path.open("rb") as file:
            raw = file.read(_SIZE_LIMIT)
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
    if not raw.startswith(_MAGIC):
        raise ImageError(f"{path} is not a core image of CRIU")
    size = int.from_bytes(raw[8:12], "little")
    message = raw[12 : 12 + size]
    if len(message) != size:
        raise ImageError(f"{path} is damaged: cut short")
    try:
        return _field(_field(message, _TASK_CORE), _COMM).decode("utf-8", "replace")
    except (IndexError, ValueError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def _field(message: bytes, wanted: int) -> bytes:
    """The first length-delimited field `wanted` of a protobuf message."""
    offset = 0
    while offset < len(message):
        key, offset = _varint(message, offset)
        kind = key & 7
        if kind == 0:
            _, offset = _varint(message, offset)
        elif kind == 2:
            size, offset = _varint(message, offset)
            if size > len(message) - offset:
                raise ValueError(f"field {key >> 3} does not end in its message")
            if key >> 3 == wanted:
                return message[offset : offset + size]
            offset += size
        elif kind in _FIXED_SIZES:
            offset += _FIXED_SIZES[kind]
        else:
            raise ValueError(f"field {key >> 3} has wire type {kind}")
    raise ValueError(f"field {wanted} is missing")


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("a number is longer than 64 bits")
