# SPDX-License-Identifier: Apache-2.0
"""Streams as bytes: headers, records, and which record may follow which. docs/format.md, "Streams".

Each record's hash covers that of the record before it, so what is lost, repeated, swapped or taken
from elsewhere is found at once, and the hash of the end record depends on every byte before it.
"""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NoReturn

from gpustasis._core import hash128
from gpustasis.errors import StreamError, UnsupportedError

FORMAT_VERSION = 1
SEALED = 1  # required feature: the checkpoint is sealed
KNOWN_FEATURES = SEALED
STREAM_MAGIC = b"\x93GPUSST\n"  # from the sender
ANSWER_MAGIC = b"\x93GPUSSA\n"  # from the receiver
HEADER_SIZE = 80
DATA_SIZE = 1 << 20  # bytes of a data record, at most
TEXT_SIZE = 64 << 10  # bytes of any other record's content, at most
MAX_FILES = 1 << 16
MAX_TOTAL = 1 << 52  # bytes of all files
HASH_SIZE = 16

_HEADER = struct.Struct("<8sIIQQ16sBB14s")  # then its hash
_PREFIX = struct.Struct("<QIB3s")
_FILE = struct.Struct("<IIQ")  # then the name
_END = struct.Struct("<QQ")
# CRIU's images, its stats-dump and our files; nothing that is hidden, a path or a link.
_NAME = re.compile(rb"[A-Za-z0-9][A-Za-z0-9_.-]{0,254}")
_RESERVED = bytes(14)


class Kind(IntEnum):
    """Of a record. From 16 on those of the receiver."""

    HELLO = 0
    FILE = 1
    DATA = 2
    PROGRESS = 3
    END = 4
    RELEASED = 5
    ABANDONED = 6
    LEFT_RUNNING = 7
    STEP = 16
    READY = 17
    RESTORED = 18
    FAILED = 19


OUTCOMES = (Kind.RELEASED, Kind.ABANDONED, Kind.LEFT_RUNNING)
_OF_SENDER = frozenset(kind for kind in Kind if kind < Kind.STEP)
_OF_RECEIVER = frozenset(kind for kind in Kind if kind >= Kind.STEP) | {Kind.HELLO}


@dataclass(frozen=True, slots=True, kw_only=True)
class Header:
    """What either side begins with. stream_id: zero in an answer. answered: the sender waits for
    answers. left_running: the job runs on at the sender's."""

    stream_id: bytes = bytes(16)
    answered: bool = False
    left_running: bool = False
    version: int = FORMAT_VERSION
    required_features: int = 0

    @property
    def sealed(self) -> bool:
        """What comes is sealed; its envelope first."""
        return bool(self.required_features & SEALED)

    def pack(self, magic: bytes) -> bytes:
        """Its bytes."""
        raw = _HEADER.pack(
            *(magic, self.version, HEADER_SIZE, self.required_features, 0, self.stream_id),
            *(self.answered, self.left_running, _RESERVED),
        )
        return raw + hash128(raw)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A file of a checkpoint. mode: permission bits."""

    name: str
    mode: int
    size: int


@dataclass(frozen=True, slots=True)
class Record:
    """content: of a data record valid until the next one is read."""

    kind: Kind
    content: memoryview
    digest: bytes


class Encoder:
    """Makes the bytes of one direction, in order."""

    def __init__(self, magic: bytes, header: Header) -> None:
        self.header = header.pack(magic)
        self._number = 0
        self.digest = self.header[-HASH_SIZE:]
        self._buffer = memoryview(bytearray(HASH_SIZE + _PREFIX.size + DATA_SIZE + HASH_SIZE))
        self._start = HASH_SIZE + _PREFIX.size

    @property
    def space(self) -> memoryview:
        """Where the content of the next data record can be put, so that it is not copied."""
        return self._buffer[self._start : self._start + DATA_SIZE]

    def record(self, kind: Kind, content: bytes | int = b"") -> memoryview:
        """A record, valid until the next. content: or the bytes that were put into `space`."""
        size = content if isinstance(content, int) else len(content)
        if not isinstance(content, int):
            self._buffer[self._start : self._start + size] = content
        self._buffer[:HASH_SIZE] = self.digest
        _PREFIX.pack_into(self._buffer, HASH_SIZE, self._number, size, kind, b"")
        end = self._start + size
        self.digest = hash128(self._buffer[:end])
        self._buffer[end : end + HASH_SIZE] = self.digest
        self._number += 1
        return self._buffer[HASH_SIZE : end + HASH_SIZE]

    def text(self, kind: Kind, fields: dict[str, object]) -> memoryview:
        """A record of names and values; texts that are too long are cut, and what is too long
        then is left out, the longest first."""
        raw = json.dumps(fields).encode()
        while len(raw) > TEXT_SIZE:
            shorter = {
                name: value[: len(value) // 2] if isinstance(value, str) else value
                for name, value in fields.items()
            }
            if shorter == fields:
                longest = max(fields, key=lambda name: len(json.dumps({name: fields[name]})))
                del shorter[longest]
            fields = shorter
            raw = json.dumps(fields).encode()
        return self.record(kind, raw)

    def file(self, entry: Entry) -> memoryview:
        """The record that a file begins with. Raises StreamError for a name that none may have."""
        name = entry.name.encode("utf-8", "surrogateescape")
        if not _NAME.fullmatch(name):
            raise StreamError(f"{entry.name!r} is no name that a file of a checkpoint may have")
        return self.record(Kind.FILE, _FILE.pack(entry.mode, 0, entry.size) + name)

    def end(self, files: int, total: int) -> memoryview:
        """The end record."""
        return self.record(Kind.END, _END.pack(files, total))


class Decoder:
    """Reads one direction and checks it, record by record.

    read: fills a buffer, or raises StreamError. place: what is read, for messages.
    """

    def __init__(self, read: Callable[[memoryview], None], magic: bytes, place: str) -> None:
        self._read = read
        self._magic = magic
        self._place = place
        self._allowed = _OF_SENDER if magic == STREAM_MAGIC else _OF_RECEIVER
        self._number = 0
        self._digest = b""
        self._buffer = memoryview(bytearray(HASH_SIZE + _PREFIX.size + DATA_SIZE + HASH_SIZE))

    def header(self) -> Header:
        """Raises StreamError if it is damaged or something else, UnsupportedError if it is of a
        later version."""
        raw = self._buffer[:HEADER_SIZE]
        self._read(raw)
        magic, version, size, required, _, stream_id, answered, left_running, rest = (
            _HEADER.unpack_from(raw)
        )
        if magic != self._magic:
            raise StreamError(f"{self._place} is no stream of gpustasis: it begins otherwise")
        self._digest = bytes(raw[-HASH_SIZE:])
        if hash128(raw[:-HASH_SIZE]) != self._digest:
            self._damaged("its header has another hash")
        if version != FORMAT_VERSION or required & ~KNOWN_FEATURES:
            raise UnsupportedError(
                f"{self._place} needs a later gpustasis: it is a stream of version {version} with "
                f"features {required:#x}; this one reads version {FORMAT_VERSION}"
            )
        wrong = size != HEADER_SIZE or rest != _RESERVED or answered > 1 or left_running > 1
        if wrong or (required and magic == ANSWER_MAGIC):
            self._damaged("its header holds what it may not")
        return Header(
            stream_id=stream_id,
            answered=bool(answered),
            left_running=bool(left_running),
            required_features=required,
        )

    def record(self) -> Record:
        """The next one. Raises StreamError if it is damaged or not the next."""
        start = HASH_SIZE + _PREFIX.size
        prefix = self._buffer[HASH_SIZE:start]
        self._read(prefix)
        number, size, kind, rest = _PREFIX.unpack(prefix)
        if number != self._number or rest != bytes(3) or kind not in self._allowed:
            self._damaged(f"what should be record {self._number} is none")
        if size > (DATA_SIZE if kind == Kind.DATA else TEXT_SIZE):
            self._damaged(f"record {number} says that it has {size} bytes")
        end = start + size
        self._read(self._buffer[start : end + HASH_SIZE])
        self._buffer[:HASH_SIZE] = self._digest
        self._digest = bytes(self._buffer[end : end + HASH_SIZE])
        if hash128(self._buffer[:end]) != self._digest:
            self._damaged(f"record {number} has another hash")
        self._number += 1
        return Record(Kind(kind), self._buffer[start:end], self._digest)

    def _damaged(self, why: str) -> NoReturn:
        raise StreamError(f"{self._place} is damaged: {why}")


class Contents:
    """Which record of a sender may follow which; what the records of files say."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._names: set[str] = set()
        self._left = 0
        self.total = 0
        self.ended = False
        self.outcome: Kind | None = None

    @property
    def files(self) -> int:
        """How many have begun."""
        return len(self._names)

    @property
    def complete(self) -> bool:
        """The file that was begun last has all its bytes."""
        return self._left == 0

    def file(self, record: Record) -> Entry:
        """What a file record says. Raises StreamError for a file that a checkpoint may not have."""
        self._require(not self.ended and self._left == 0, record.kind)
        raw = bytes(record.content)
        if len(raw) <= _FILE.size:
            self._refuse("a file has no name")
        mode, reserved, size = _FILE.unpack_from(raw)
        name = raw[_FILE.size :]
        if not _NAME.fullmatch(name):
            self._refuse(f"{name!r} is no name that a file of a checkpoint may have")
        text = name.decode("ascii")
        if text in self._names:
            self._refuse(f"{text} comes twice")
        if mode & ~0o777 or reserved:
            self._refuse(f"{text} has mode {mode:o}")
        if self.files >= MAX_FILES or size > MAX_TOTAL - self.total:
            self._refuse(f"with {text} it has more files or bytes than a checkpoint may have")
        self._names.add(text)
        self._left = size
        self.total += size
        return Entry(name=text, mode=mode, size=size)

    def data(self, record: Record) -> memoryview:
        """Bytes of the file that was begun last."""
        size = len(record.content)
        self._require(not self.ended and 0 < size <= self._left, record.kind)
        self._left -= size
        return record.content

    def end(self, record: Record) -> None:
        """All files are there."""
        self._require(not self.ended and self._left == 0, record.kind)
        if len(record.content) != _END.size:
            self._refuse("its end record has another size")
        if _END.unpack(record.content) != (self.files, self.total):
            self._refuse("its end record counts other files")
        self.ended = True

    def other(self, record: Record, header: Header) -> None:
        """A record that is none of these."""
        kind = record.kind
        if kind in OUTCOMES:
            fits = (kind is Kind.LEFT_RUNNING) == header.left_running or kind is Kind.ABANDONED
            early = not self.ended and kind is not Kind.ABANDONED
            self._require(self.outcome is None and fits and not early, kind)
            self._require(kind is Kind.ABANDONED or not record.content, kind)
            self.outcome = kind
        else:
            self._require(kind is Kind.PROGRESS and not record.content, kind)

    def _require(self, condition: bool, kind: Kind) -> None:
        if not condition:
            self._refuse(f"a record of kind {kind.name} comes where none may")

    def _refuse(self, why: str) -> NoReturn:
        raise StreamError(f"{self._place} is damaged: {why}")


def _no_number(word: str) -> NoReturn:
    raise ValueError(f"{word} is no number of JSON")


def parse_text(record: Record, place: str) -> dict[str, Any]:
    """Names and values of a record. Raises StreamError."""
    try:
        found = json.loads(bytes(record.content).decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as exc:
        raise StreamError(f"{place}: a record of kind {record.kind.name} is malformed") from exc
    if not isinstance(found, dict):
        raise StreamError(f"{place}: a record of kind {record.kind.name} holds no names")
    return found
