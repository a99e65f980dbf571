"""CRIU's pstree.img: the processes of a checkpoint.

Source: CRIU images/pstree.proto and criu/include/magic.h.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from gpustasis.criu.protobuf import fields, packed
from gpustasis.criu.records import has_magic, records
from gpustasis.errors import ImageError

PSTREE_NAME = "pstree.img"
_PSTREE_MAGIC = 0x50273030
_THREADS = 5  # pstree_entry.threads, packed or not


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
        return parse_pstree(path.read_bytes(), str(path))
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc


def parse_pstree(raw: bytes, path: str) -> tuple[Task, ...]:
    """The same from the content of the file; `path` is for messages. Raises ImageError."""
    if not has_magic(raw, _PSTREE_MAGIC):
        raise ImageError(f"{path} is not a process tree of CRIU")
    try:
        tasks = tuple(_task(record) for record in records(raw))
    except (ValueError, IndexError, KeyError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc
    if not tasks:
        raise ImageError(f"{path} holds no process")
    return tasks


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
