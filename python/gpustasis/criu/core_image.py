"""CRIU's core-PID.img: the name of a process, and the machine it ran on.

Source: CRIU images/core.proto and criu/include/magic.h (two magic words, a 32-bit length, one
protobuf message, little-endian).
"""

from __future__ import annotations

from gpustasis.criu.protobuf import fields
from gpustasis.errors import ImageError

_MAGIC = bytes.fromhex("1943565447380555")  # v1.1 image, CORE_MAGIC
_MACHINE = 1  # core_entry.mtype
# core_entry.march, by number
_MACHINES = (
    *("unknown", "X86_64", "ARM", "AARCH64", "PPC64", "S390", "MIPS", "LOONGARCH64", "RISCV64"),
)
_TASK_CORE = 3  # core_entry.tc
_COMM = 6  # task_core_entry.comm


def core_name(pid: int) -> str:
    return f"core-{pid}.img"


def parse_comm(raw: bytes, path: str) -> str:
    """The comm of a process from its core image; `path` is for messages.

    Raises ImageError if it is none, or damaged.
    """
    message = _message(raw, path)
    try:
        return _field(_field(message, _TASK_CORE), _COMM).decode("utf-8", "replace")
    except (IndexError, ValueError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def parse_machine(raw: bytes, path: str) -> str:
    """The kind of machine, as CRIU names it: "X86_64". Raises as parse_comm."""
    message = _message(raw, path)
    try:
        number = next(v for n, v in fields(message) if n == _MACHINE and isinstance(v, int))
    except (StopIteration, IndexError, ValueError) as exc:
        raise ImageError(f"{path} is damaged: it does not say its machine") from exc
    return _MACHINES[number] if number < len(_MACHINES) else f"machine {number}"


def _message(raw: bytes, path: str) -> bytes:
    if not raw.startswith(_MAGIC):
        raise ImageError(f"{path} is not a core image of CRIU")
    size = int.from_bytes(raw[8:12], "little")
    message = raw[12 : 12 + size]
    if len(message) != size:
        raise ImageError(f"{path} is damaged: cut short")
    return message


def _field(message: bytes, wanted: int) -> bytes:
    """The first field `wanted` that has a length."""
    for number, value in fields(message):
        if number == wanted and isinstance(value, bytes):
            return value
    raise ValueError(f"field {wanted} is missing")
