# SPDX-License-Identifier: Apache-2.0
"""What CRIU's own images say: process tree, names, machine, open files, pages that lie in an
earlier checkpoint, and what a dump took.

Sources: CRIU images/{core,inventory,pstree,pagemap,stats,fdinfo,regfile,remap-file-path}.proto,
criu/include/magic.h and pagemap.h, criu/files-reg.c; Protocol Buffers documentation, "Encoding". An
image is two magic words, then records of a 32-bit length and one protobuf message; all numbers
little-endian.
"""

from __future__ import annotations

import logging
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import open_regular

log = logging.getLogger(__name__)

PSTREE_NAME = "pstree.img"
INVENTORY_NAME = "inventory.img"  # CRIU writes it last: without it a checkpoint is not complete
STATISTICS_NAME = "stats-dump"
RESTORE_STATISTICS_NAME = "stats-restore"
FILES_NAME = "files.img"
REMAPS_NAME = "remap-fpath.img"  # files that a restore makes or finds otherwise than by their paths
MOUNTS_PREFIX = "mountpoints-"  # only of a tree with mounts of its own
TERMINALS_NAME = "tty-info.img"  # only if there are any
PARENT_LINK = "parent"  # CRIU's own, to the directory of --prev-images-dir

_COMMON_MAGIC = 0x54564319  # "1.1 images"
_SERVICE_MAGIC = 0x55105940
_CORE_MAGIC, _PSTREE_MAGIC, _PAGEMAP_MAGIC = 0x55053847, 0x50273030, 0x56084025
_STATISTICS_MAGIC = 0x57093306
_INVENTORY_MAGIC = 0x58313116
_FILES_MAGIC, _REMAPS_MAGIC = 0x56303138, 0x59133954
_FILE_LIMIT = 16 << 20  # bytes of a process tree, or an inventory: a million processes
_RECORD_LIMIT = 1 << 20  # bytes; a task with 100,000 threads stays below it
_VARINT, _FIXED_64, _LENGTH, _FIXED_32 = 0, 1, 2, 5  # wire types of protobuf
_FIXED_SIZES = {_FIXED_64: 8, _FIXED_32: 4}

_PLUGINS = 12  # inventory_entry.plugins_entry, and plugins_entry.plugins
_MACHINE, _TASK_CORE = 1, 3  # core_entry.mtype, core_entry.tc
_COMM = 6  # task_core_entry.comm
# core_entry.march, by number
_MACHINES = (
    *("unknown", "X86_64", "ARM", "AARCH64", "PPC64", "S390", "MIPS", "LOONGARCH64", "RISCV64"),
)
_THREADS = 5  # pstree_entry.threads, packed or not
_PAGEMAP_NAME = re.compile(r"pagemap-.*\.img")
_NR_PAGES_32, _IN_PARENT, _FLAGS, _NR_PAGES = 2, 3, 4, 5  # pagemap_entry
_PE_PARENT = 1
_FILE_TYPE, _REGULAR, _REGULAR_FILE = 1, 1, 3  # file_entry.type, fd_types.REG, file_entry.reg
_FILE_ID, _FILE_PATH, _FILE_SIZE, _EXTERNAL, _MODE = 1, 6, 8, 9, 10  # reg_file_entry
_ORIGINAL = 1  # remap_file_path_entry.orig_id
_DUMP, _RESTORE = 1, 2  # stats_entry.dump, stats_entry.restore
_DUMP_FIGURES = {  # dump_stats_entry, in part; times in microseconds
    1: "freezing_time",
    2: "frozen_time",
    3: "memdump_time",
    4: "memwrite_time",
    5: "pages_scanned",
    7: "pages_written",
}
_RESTORE_FIGURES = {3: "forking_time", 4: "restore_time"}  # restore_stats_entry, likewise


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
    return parse_pstree(_read(path, _FILE_LIMIT), str(path))


def parse_pstree(raw: bytes, path: str) -> tuple[Task, ...]:
    """The same from the content of the file; `path` is for messages. Raises ImageError."""
    messages = _messages(raw, _PSTREE_MAGIC, path, "a process tree")
    try:
        tasks = tuple(_task(message) for message in messages)
    except (ValueError, IndexError, KeyError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc
    if not tasks:
        raise ImageError(f"{path} holds no process")
    return tasks


def inventory_plugins(images: Path) -> tuple[str, ...]:
    """Names of the plugins that a restore of `images` needs. Raises ImageError."""
    path = images / INVENTORY_NAME
    return parse_inventory_plugins(_read(path, _FILE_LIMIT), str(path))


def parse_inventory_plugins(raw: bytes, path: str) -> tuple[str, ...]:
    """The same from the content of the file; `path` is for messages. Raises ImageError."""
    if _word(raw, 0) != _INVENTORY_MAGIC:
        raise ImageError(f"{path} is not an inventory of CRIU")
    messages = _records(raw, 4)  # the one image with a single magic word
    try:
        return tuple(
            name.decode("utf-8", "replace")
            for message in messages
            for number, entry in fields(message)
            if number == _PLUGINS and isinstance(entry, bytes)
            for inner, name in fields(entry)
            if inner == _PLUGINS and isinstance(name, bytes)
        )
    except (ValueError, IndexError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def core_name(pid: int) -> str:
    """The image with the name and the machine of a process."""
    return f"core-{pid}.img"


def parse_comm(raw: bytes, path: str) -> str:
    """The comm of a process from its core image; `path` is for messages.

    Raises ImageError if it is none, or damaged.
    """
    message = _core(raw, path)
    try:
        return _part(_part(message, _TASK_CORE), _COMM).decode("utf-8", "replace")
    except (IndexError, ValueError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def parse_machine(raw: bytes, path: str) -> str:
    """The kind of machine, as CRIU names it: "X86_64". Raises as parse_comm."""
    message = _core(raw, path)
    try:
        number = next(v for n, v in fields(message) if n == _MACHINE and isinstance(v, int))
    except (StopIteration, IndexError, ValueError) as exc:
        raise ImageError(f"{path} is damaged: it does not say its machine") from exc
    return _MACHINES[number] if number < len(_MACHINES) else f"machine {number}"


def parent_pages(images: Path) -> dict[str, int]:
    """Pages that lie in the parent, by name of the pagemap that says so; none: empty.

    Raises ImageError if a pagemap cannot be read.
    """
    names = sorted(path.name for path in images.iterdir() if is_pagemap(path.name))
    counts = {name: count_parent_pages(_read(images / name), str(images / name)) for name in names}
    return {name: count for name, count in counts.items() if count}


def is_pagemap(name: str) -> bool:
    """Whether a file of that name in an image directory is a pagemap."""
    return _PAGEMAP_NAME.fullmatch(name) is not None


def count_parent_pages(raw: bytes, path: str) -> int:
    """Pages of one pagemap that lie in the parent; `path` is for messages. Raises ImageError."""
    entries = _messages(raw, _PAGEMAP_MAGIC, path, "a pagemap")
    try:
        next(entries, None)  # the head: which pages-N.img
        return sum(_pages_in_parent(entry) for entry in entries)
    except (ValueError, IndexError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def parse_open_files(raw: bytes, path: str) -> dict[int, tuple[str, int]]:
    """Path and size of each regular file whose size a restore compares, by CRIU's number for it:
    files that were open or mapped, but for those open for appending alone. `path` is for messages.
    Raises ImageError."""
    found: dict[int, tuple[str, int]] = {}
    try:
        for message in _messages(raw, _FILES_MAGIC, path, "a list of files"):
            if dict(fields(message)).get(_FILE_TYPE) != _REGULAR:
                continue
            file = dict(fields(_part(message, _REGULAR_FILE)))
            size, name, mode = (file.get(n) for n in (_FILE_SIZE, _FILE_PATH, _MODE))
            if not isinstance(size, int) or not isinstance(name, bytes) or file.get(_EXTERNAL):
                continue
            if isinstance(mode, int) and stat.S_ISREG(mode):
                found[int(file[_FILE_ID])] = (os.fsdecode(name), size)
    except (ValueError, IndexError, KeyError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc
    return found


def parse_remapped(raw: bytes, path: str) -> frozenset[int]:
    """Numbers of the files that a restore does not find by their paths: without a name, of /proc.
    `path` is for messages. Raises ImageError."""
    try:
        return frozenset(
            number
            for message in _messages(raw, _REMAPS_MAGIC, path, "a list of remapped files")
            if isinstance(number := dict(fields(message)).get(_ORIGINAL), int)
        )
    except (ValueError, IndexError) as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def dump_figures(raw: bytes) -> dict[str, int]:
    """CRIU's own figures of a dump from its file stats-dump, times in microseconds; empty if that
    is not what it is."""
    return _statistics(raw, _DUMP, _DUMP_FIGURES)


def restore_figures(raw: bytes) -> dict[str, int]:
    """The same of a restore, from its file stats-restore. restore_time: of all of it, but for what
    plugins do when all tasks are restored."""
    return _statistics(raw, _RESTORE, _RESTORE_FIGURES)


def _statistics(raw: bytes, part: int, names: dict[int, str]) -> dict[str, int]:
    if (_word(raw, 0), _word(raw, 4)) != (_SERVICE_MAGIC, _STATISTICS_MAGIC):
        return {}
    try:
        found = dict(fields(_part(next(_records(raw)), part)))
    except (ValueError, IndexError, StopIteration):
        return {}
    return {
        name: value for number, name in names.items() if isinstance(value := found.get(number), int)
    }


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


def _read(path: Path, limit: int | None = None) -> bytes:
    """Raises ImageError also if there are more bytes than `limit`."""
    try:
        with open_regular(path) as file:
            if limit is not None and os.fstat(file.fileno()).st_size > limit:
                raise ImageError(f"{path} is larger than the {limit} bytes that it may have")
            return file.read()
    except OSError as exc:
        raise ImageError(f"cannot read {path}: {exc.strerror}") from exc


def _messages(raw: bytes, magic: int, path: str, what: str) -> Iterator[bytes]:
    """The messages of a whole image. Raises ImageError if it is not of this kind; the iterator
    raises ValueError where the image is cut short."""
    if _word(raw, 0) != _COMMON_MAGIC or _word(raw, 4) != magic:
        raise ImageError(f"{path} is not {what} of CRIU")
    return _records(raw)


def _records(raw: bytes, offset: int = 8) -> Iterator[bytes]:
    while offset < len(raw):
        size = _word(raw, offset)
        record = raw[offset + 4 : offset + 4 + size]
        if size > _RECORD_LIMIT or len(record) != size:
            raise ValueError(f"a record at byte {offset} does not end in the file")
        yield record
        offset += 4 + size


def _word(raw: bytes, offset: int) -> int:
    return int.from_bytes(raw[offset : offset + 4], "little")


def _varint(raw: bytes, offset: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        byte = raw[offset]
        offset += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, offset
    raise ValueError("a number is longer than 64 bits")


def _packed(raw: bytes) -> Iterator[int]:
    """The numbers of a packed repeated field."""
    offset = 0
    while offset < len(raw):
        value, offset = _varint(raw, offset)
        yield value


def _task(message: bytes) -> Task:
    single: dict[int, int] = {}
    threads: list[int] = []
    for number, value in fields(message):
        if number == _THREADS:
            threads += _packed(value) if isinstance(value, bytes) else [value]
        elif isinstance(value, int):
            single[number] = value
    return Task(
        pid=single[1], ppid=single[2], pgid=single[3], sid=single[4], threads=tuple(threads)
    )


def _core(raw: bytes, path: str) -> bytes:
    try:
        return next(_messages(raw, _CORE_MAGIC, path, "a core image"), b"")
    except ValueError as exc:
        raise ImageError(f"{path} is damaged: {exc}") from exc


def _part(message: bytes, wanted: int) -> bytes:
    """The first field `wanted` that has a length."""
    for number, value in fields(message):
        if number == wanted and isinstance(value, bytes):
            return value
    raise ValueError(f"field {wanted} is missing")


def _pages_in_parent(entry: bytes) -> int:
    """Of one run of pages; older CRIUs say it with a field of its own, newer ones with a flag."""
    numbers = {number: value for number, value in fields(entry) if isinstance(value, int)}
    if not numbers.get(_IN_PARENT) and not numbers.get(_FLAGS, 0) & _PE_PARENT:
        return 0
    return max(numbers.get(_NR_PAGES, 0), numbers.get(_NR_PAGES_32, 0), 1)


def prepare_directory(images: Path) -> None:
    """Make an empty place for the images of a dump: what another one left there would be taken for
    this one's. Raises CheckpointError."""
    try:
        images.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as exc:
        raise CheckpointError(f"cannot make {images}: {exc.strerror}") from exc
    if (images / INVENTORY_NAME).exists():
        raise CheckpointError(f"{images} holds a checkpoint already; name another directory")
    mode = stat.S_IMODE(images.stat().st_mode)
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        log.warning(
            "others than its owner may look into %s (mode %04o), where CRIU's images will hold the "
            "memory of the processes with mode 0644: chmod 700 keeps them out",
            *(images, mode),
        )
