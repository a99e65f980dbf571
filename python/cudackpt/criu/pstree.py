"""CRIU's pstree.img: the processes of a checkpoint.

Source: CRIU images/pstree.proto and criu/include/magic.h (v1.1 images: two magic words, then
records of a 32-bit length and a protobuf message, all little-endian).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cudackpt.criu.protobuf import fields, packed
from cudackpt.errors import ImageError

PSTREE_NAME = "pstree.img"
_IMAGE_MAGIC = 0x54564319  # "1.1 images"
_PSTREE_MAGIC = 0x50273030
_THREADS = 5  # pstree_entry.threads, packed or not
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
    for number, value in fields(record):
        if number == _THREADS:
            threads += packed(value) if isinstance(value, bytes) else [value]
        elif isinstance(value, int):
            single[number] = value
    return Task(
        pid=single[1], ppid=single[2], pgid=single[3], sid=single[4], threads=tuple(threads)
    )
