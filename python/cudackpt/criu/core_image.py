"""CRIU's core-PID.img: the name of a process.

Source: CRIU images/core.proto and criu/include/magic.h (two magic words, a 32-bit length, one
protobuf message, little-endian).
"""

from __future__ import annotations

from cudackpt.criu.protobuf import fields
from cudackpt.errors import ImageError

_MAGIC = bytes.fromhex("1943565447380555")  # v1.1 image, CORE_MAGIC
_TASK_CORE = 3  # core_entry.tc
_COMM = 6  # task_core_entry.comm


def core_name(pid: int) -> str:
    return f"core-{pid}.img"


def parse_comm(raw: bytes, path: str) -> str:
    """The comm of a process from its core image; `path` is for messages.

    Raises ImageError if it is none, or damaged.
    """
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
    """The first field `wanted` that has a length."""
    for number, value in fields(message):
        if number == wanted and isinstance(value, bytes):
            return value
    raise ValueError(f"field {wanted} is missing")
