"""CRIU's pstree.img: the processes of a checkpoint.

Source: CRIU images/pstree.proto and criu/include/magic.h (v1.1 images: two magic words, then
records of a 32-bit length and a protobuf message, all little-endian).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cudackpt.errors import ImageError

PSTREE_NAME = "pstree.img"
_IMAGE_MAGIC = 0x54564319  # "1.1 images"
_PSTREE_MAGIC = 0x50273030
_RECORD_LIMIT = 1 << 20  # bytes; a task with 100,000 threads stays below it


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One process; all numbers as its innermost pid namespace has them. ppid 0: the root."""

    pid: int
    ppid: int
    pgid: int
    sid: int
    threads: tuple[int, ...]


def read_pstree(images: Path) -> tuple[Task, ...]:
    """The processes in `images`, the root first. Raises ImageError if the file is no such image."""
    path = images / PSTREE_NAME
    try:
        raw = path.read_bytes()
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
    if _word(raw, 0) != _IMAGE_MAGIC or _word(raw, 4) != _PSTREE_MAGIC:
        raise ImageError(f"{path} is not a process tree of CRIU")
    try:
        tasks = tuple(_task(record) for record in _records(raw[8:]))
    except (ValueError, IndexError, KeyError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc
    if not tasks:
        raise ImageError(f"{path} holds no process")
    return tasks


def _word(raw: bytes, offset: int) -> int:
    return int.from_bytes(raw[offset : offset + 4], "little")


def _records(raw: bytes) -> Iterator[bytes]:
    offset = 0
    while offset < len(raw):
        size = _word(raw, offset)
        record = raw[offset + 4 : offset + 4 + size]
        if size > _RECORD_LIMIT or len(record) != size:
            raise ValueError(f"a record at byte {offset + 8} does not end in the file")
        yield record
        offset += 4 + size


def _task(record: bytes) -> Task:
    single: dict[int, int] = {}
    threads: list[int] = []
    offset = 0
    while offset < len(record):
        key, offset = _varint(record, offset)
        field, kind = key >> 3, key & 7
        value, offset = _varint(record, offset)
        if kind == 0 and field == 5:
            threads.append(value)
        elif kind == 0:
            single[field] = value
        elif kind == 2:  # threads may be packed; other fields of this kind are not for us
            end = offset + value
            while field == 5 and offset < end:
                tid, offset = _varint(record, offset)
                threads.append(tid)
            offset = end
        else:
            raise ValueError(f"field {field} has wire type {kind}")
    return Task(
        pid=single[1], ppid=single[2], pgid=single[3], sid=single[4], threads=tuple(threads)
    )


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("a number is longer than 64 bits")
