# SPDX-License-Identifier: Apache-2.0
"""The members of a tar archive, one after the other, each of them suspected.

The names are those that an engine would unpack to. GNU tar, Go's archive/tar and this reader must
read an archive in the same way, else what was looked through is not what an engine restores. So
what any writer writes is read, and what two readers could read in two ways is refused: more than
one extended header for a member, numbers and text in forms that no writer uses, a name twice, a
file below a link, sparse members. tests/campaigns/tar_readers.py compares the three.

Sources: POSIX.1-2017 pax, "ustar Interchange Format" and "pax Interchange Format"; GNU tar manual,
"Basic Tar Format" (long names, base-256 numbers).
"""

from __future__ import annotations

import re
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gpustasis.archive.stream import Limits, UnpackedStream
from gpustasis.errors import ArchiveError

BLOCK_SIZE = 512
_FIELDS = struct.Struct("<100s8s8s8s12s12s8s1s100s8s32s32s8s8s167s")
_CHECKSUM = slice(148, 156)
_USTAR, _GNU = b"ustar\x0000", b"ustar  \0"  # magic and version
_PREFIX_SIZE = 155  # bytes of what follows the device numbers; POSIX
_GNU_TIMES = (slice(0, 12), slice(12, 24))  # there as well; GNU
_OCTAL = re.compile(rb" *([0-7]+)[ \0]*")
_MAX_NUMBER = (1 << 63) - 1

_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_TARGET = b"x", b"g", b"L", b"K"
_EXTENSIONS = (_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_TARGET)
_RECORD_LENGTH = re.compile(rb"([1-9][0-9]{0,7}) ")
_TIME = re.compile(rb"(-?)([0-9]{1,10})(?:\.([0-9]+))?")
_NUMBER = re.compile(rb"[0-9]{1,18}")
_NS = 1_000_000_000
_NAME_COST = 160  # bytes of memory that a name takes beside its letters


class Kind(Enum):
    """What a member is; the value is for messages."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symbolic link"
    HARDLINK = "hard link"
    CHARACTER_DEVICE = "character device"
    BLOCK_DEVICE = "block device"
    FIFO = "FIFO"


_KINDS = {
    b"0": Kind.FILE,
    b"\0": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHARACTER_DEVICE,
    b"4": Kind.BLOCK_DEVICE,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}
_LINKS = (Kind.SYMLINK, Kind.HARDLINK)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """name: relative, without "." and ".."; not UTF-8: with surrogate escapes. size: bytes of a
    file, else 0. mode: permissions. mtime_ns: nanoseconds since 1970. target: of a link."""

    name: str
    kind: Kind
    size: int
    mode: int
    mtime_ns: int
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Header:
    """One block: names are bytes, times whole seconds, sizes bytes."""

    name: bytes
    mode: int
    size: int
    mtime: int
    type: bytes
    target: bytes


class TarReader:
    """Iterates over the members; the content of each is read, or skipped, before the next one.

    Memory: the names and link targets of all members, bounded by the limits.
    """

    def __init__(self, stream: UnpackedStream, limits: Limits) -> None:
        self._stream = stream
        self._limits = limits
        self._headers = 0
        self._left = 0  # bytes of the member not read yet
        self._padding = 0
        self._kinds: dict[str, Kind | None] = {}  # None: a directory that only names imply
        self._names_bytes = 0

    def __iter__(self) -> Iterator[Member]:
        """Raises ArchiveError for what is damaged, out of bounds or ambiguous."""
        while (member := self._next()) is not None:
            yield member

    def read(self, size: int) -> bytes:
        """The next `size` bytes of the member. Raises ArchiveError if it has fewer."""
        self._take(size)
        return self._stream.read(size)

    def skip(self, size: int) -> None:
        """Go on behind the next `size` bytes of the member. Raises as read."""
        self._take(size)
        self._stream.skip(size)

    @property
    def position(self) -> int:
        """Bytes of the unpacked archive before the next one of the member."""
        return self._stream.position

    def _take(self, size: int) -> None:
        if size > self._left:
            raise ArchiveError(
                f"{self._stream.name}: {size} bytes of a member that has {self._left} left"
            )
        self._left -= size

    def _next(self) -> Member | None:
        self._stream.skip(self._left + self._padding)
        self._left = self._padding = 0
        extended: dict[bytes, bytes] = {}
        seen: set[bytes] = set()
        while (header := self._header()) is not None:
            if header.type not in _EXTENSIONS:
                return self._member(header, extended)
            self._extend(header, extended, seen)
        if seen:
            raise self._error("ends behind an extended header")
        self._require_end()
        return None

    def _header(self) -> _Header | None:
        """None: a block of zeros, the end."""
        block = self._stream.read(BLOCK_SIZE)
        if not any(block):
            return None
        self._headers += 1
        if self._headers > self._limits.members:
            raise self._error(f"has more than {self._limits.members} members")
        try:
            return _parse_header(block)
        except ValueError as exc:
            raise self._error(f"the header of member {self._headers}: {exc}") from exc

    def _require_end(self) -> None:
        """A second block of zeros, and only zeros behind it."""
        padding = self._stream.read_some(self._limits.padding_bytes)
        if len(padding) < BLOCK_SIZE:
            raise self._error("is cut short: its end mark is not whole")
        if any(padding):
            raise self._error("something follows behind its end mark")
        if self._stream.read_some(1):
            raise self._error(f"more than {self._limits.padding_bytes} bytes follow its end mark")

    def _extend(self, header: _Header, extended: dict[bytes, bytes], seen: set[bytes]) -> None:
        """Note what an extended header says of the member to come. Which of two headers counts,
        readers do not agree on: one of POSIX's, or of GNU's one for the name and one for the
        target, is all that a member may have."""
        kind = header.type.decode()
        if header.type == _PAX_GLOBAL:
            raise self._error(
                "a pax header for all members that follow (type g), which no engine writes"
            )
        if header.type in seen or (seen and _PAX in (*seen, header.type)):
            before = " and ".join(repr(other.decode()) for other in sorted(seen))
            raise self._error(
                f"an extended header of type {kind!r} behind one of type {before}, for one member"
            )
        seen.add(header.type)
        limit = self._limits.header_bytes
        if header.size > limit:
            raise self._error(f"an extended header of {header.size} bytes; {limit} are the limit")
        raw = self._stream.read(header.size)
        self._stream.skip(-header.size % BLOCK_SIZE)
        try:
            if header.type == _PAX:
                extended.update(_pax_fields(raw))
            else:
                text, end = raw[:-1], raw[-1:]
                if not text or end != b"\0" or b"\0" in text:
                    raise ValueError(f"no text that ends in one zero byte: {raw[:40]!r}")
                extended[b"path" if header.type == _LONG_NAME else b"linkpath"] = text
        except ValueError as exc:
            raise self._error(f"an extended header (type {kind}): {exc}") from exc

    def _member(self, header: _Header, extended: dict[bytes, bytes]) -> Member:
        name = self._name(extended.get(b"path", header.name), header.type)
        if header.type not in _KINDS:
            raise self._error(
                f"member {name!r} is of type {header.type!r}, which is not read "
                "(sparse, or of more than one volume)"
            )
        kind = _KINDS[header.type]
        size = int(extended.get(b"size", header.size))
        if kind is not Kind.FILE and size:
            raise self._error(f"member {name!r} is a {kind.value} with {size} bytes of content")
        if size > self._limits.unpacked_bytes:
            raise self._error(
                f"member {name!r} has {size} bytes; {self._limits.unpacked_bytes} are the limit"
            )
        target = extended.get(b"linkpath", header.target) if kind in _LINKS else b""
        if kind in _LINKS and not target:
            raise self._error(f"member {name!r} is a link without a target")
        if len(target) > self._limits.name_bytes:
            raise self._error(f"member {name!r} is a link with a target of {len(target)} bytes")
        target_name = target.decode("utf-8", "surrogateescape")
        self._register(name, kind, target_name)
        self._left, self._padding = size, -size % BLOCK_SIZE
        mtime_ns = _NS * header.mtime
        if b"mtime" in extended:
            mtime_ns = _time_ns(extended[b"mtime"])
        return Member(
            name=name,
            kind=kind,
            size=size,
            mode=header.mode,
            mtime_ns=mtime_ns,
            target=target_name,
        )

    def _name(self, raw: bytes, kind: bytes) -> str:
        limits = self._limits
        if len(raw) > limits.name_bytes:
            raise self._error(
                f"a name of {len(raw)} bytes, {raw[:40]!r}...; {limits.name_bytes} are the limit"
            )
        name = raw.decode("utf-8", "surrogateescape")
        parts = [part for part in name.split("/") if part not in ("", ".")]
        if name.startswith("/") or ".." in parts or "\0" in name:
            raise self._error(f"member {name!r} has a name that leads out of the archive")
        if len(parts) - 1 > limits.name_parts:
            raise self._error(
                f"member {name[:80]!r}... lies {len(parts) - 1} directories deep; "
                f"{limits.name_parts} are the limit"
            )
        if kind != b"5" and name.endswith(("/", "/.")):
            raise self._error(f"member {name!r} has the name of a directory and is none")
        if not name or (not parts and kind != b"5"):
            raise self._error(f"member {name!r} has no name")
        return "/".join(parts)

    def _register(self, name: str, kind: Kind, target: str) -> None:
        """Refuse what is there already, and what lies in something that is no directory."""
        parts = name.split("/")
        for count in range(1, len(parts)):
            above = "/".join(parts[:count])
            if self._kinds.setdefault(above, None) not in (None, Kind.DIRECTORY):
                raise self._error(f"member {name!r} lies in {above!r}, which is no directory")
        if name not in self._kinds:
            self._names_bytes += (_memory_of(name) + _NAME_COST) * len(parts) + _memory_of(target)
            if self._names_bytes > self._limits.names_bytes:
                raise self._error(
                    "its names and the targets of its links take more than "
                    f"{self._limits.names_bytes} bytes of memory"
                )
        elif self._kinds[name] is not None or kind is not Kind.DIRECTORY:
            raise self._error(f"member {name!r} comes twice")
        self._kinds[name] = kind

    def _error(self, what: str) -> ArchiveError:
        return ArchiveError(f"{self._stream.name}: {what}")


def _parse_header(block: bytes) -> _Header:
    """Take a block apart. Raises ValueError that says what is wrong with it."""
    fields = _FIELDS.unpack(block)
    name, mode, uid, gid, size, mtime, checksum, kind, target, magic = fields[:10]
    major, minor, rest = fields[12:]
    counted = sum(block) - sum(block[_CHECKSUM]) + 8 * ord(" ")
    if _number(checksum) != counted:
        raise ValueError("its checksum is wrong")
    for owner in (uid, gid):
        _number(owner)
    for device in (major, minor):
        if device.strip(b" \0") or kind in b"34":  # some writers leave it blank where there is none
            _number(device)
    whole = _text(name)
    if magic == _USTAR:
        # What stands in a part of it makes some readers take it for another format.
        prefix, unused = rest[:_PREFIX_SIZE], rest[_PREFIX_SIZE:]
        if any(unused) or any(prefix[len(_text(prefix)) :]):
            raise ValueError("something stands behind its name, where POSIX has zeros")
        if _text(prefix):
            whole = _text(prefix) + b"/" + whole
    elif magic == _GNU:
        for times in _GNU_TIMES:
            if any(rest[times]):
                _number(rest[times])
        if any(rest[_GNU_TIMES[-1].stop :]):
            raise ValueError("it says that the member is sparse, or of more than one volume")
    else:
        raise ValueError(f"its magic is {magic!r}, which is neither POSIX's nor GNU's")
    return _Header(
        name=whole,
        mode=_number(mode) & 0o7777,
        size=_number(size),
        mtime=_number(mtime),
        type=kind,
        target=_text(target),
    )


def _number(field: bytes) -> int:
    """An octal number, or GNU's base-256 one. Raises ValueError."""
    if field[0] & 0x80:
        value = int.from_bytes(field[1:], "big")
        if field[0] != 0x80 or value > _MAX_NUMBER:
            raise ValueError(f"a number is negative or too large: {field!r}")
        return value
    digits = _OCTAL.fullmatch(field)
    if digits is None:
        raise ValueError(f"a number is not octal: {field!r}")
    return int(digits[1], 8)


def _pax_fields(raw: bytes) -> dict[bytes, bytes]:
    """What the records of a pax header say of path, linkpath, size and mtime. Raises ValueError if
    they are damaged, ambiguous, or of a sparse member."""
    found: dict[bytes, bytes] = {}
    for keyword, value in _pax_records(raw):
        if keyword.startswith(b"GNU."):
            raise ValueError(f"{keyword.decode('ascii', 'replace')}: sparse members are not read")
        check = _PAX_VALUES.get(keyword)
        if check is None:
            continue
        if keyword in found:
            raise ValueError(f"{keyword.decode()} comes twice")
        if check.fullmatch(value) is None:
            raise ValueError(f"{keyword.decode()} is {value[:40]!r}")
        found[keyword] = value
    return found


_TEXT = re.compile(rb"[^\0]+", re.DOTALL)
# What any reader takes for a property of the member, and what a reader agrees with the others on.
_PAX_VALUES = (
    dict.fromkeys((b"path", b"linkpath", b"uname", b"gname"), _TEXT)
    | dict.fromkeys((b"size", b"uid", b"gid"), _NUMBER)
    | dict.fromkeys((b"mtime", b"atime", b"ctime"), _TIME)
)


def _pax_records(raw: bytes) -> Iterator[tuple[bytes, bytes]]:
    offset = 0
    while offset < len(raw):
        length = _RECORD_LENGTH.match(raw, offset)
        if length is None:
            raise ValueError(f"a pax record at byte {offset} has no length")
        end = offset + int(length[1])
        record = raw[length.end() : end]
        if end > len(raw) or not record.endswith(b"\n"):
            raise ValueError(f"a pax record at byte {offset} is not as long as it says")
        keyword, equals, value = record[:-1].partition(b"=")
        if not equals or not re.fullmatch(rb"[!-~]+", keyword):
            raise ValueError(f"a pax record at byte {offset} has no keyword")
        yield keyword, value
        offset = end


def _time_ns(value: bytes) -> int:
    """In nanoseconds; before 1970 counts as 1970."""
    found = _TIME.fullmatch(value)
    assert found is not None, value
    minus, whole, part = found.groups()
    return 0 if minus else int(whole) * _NS + int((part or b"")[:9].ljust(9, b"0"))


def _memory_of(text: str) -> int:
    """Bytes that its letters take: one that is wide makes all of them as wide."""
    return sys.getsizeof(text) - sys.getsizeof("")


def _text(field: bytes) -> bytes:
    return field.partition(b"\0")[0]
