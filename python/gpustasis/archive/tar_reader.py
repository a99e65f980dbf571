"""The members of a tar archive, one after the other, each of them suspected.

The names are those that an engine would unpack to. What could mean one thing to this reader and
another to the engine's (a name twice, a file below a link, a sparse member) is refused.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from gpustasis.archive.compression import UnpackedStream
from gpustasis.archive.limits import Limits
from gpustasis.archive.tar_header import BLOCK_SIZE, TarHeader, parse_header, pax_records
from gpustasis.errors import ArchiveError

_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_TARGET = b"x", b"g", b"L", b"K"
_EXTENSIONS = (_PAX, _PAX_GLOBAL, _LONG_NAME, _LONG_TARGET)
_NS = 1_000_000_000
_NAME_COST = 160  # bytes of memory that a name takes beside its letters


class Kind(Enum):
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
    b"7": Kind.FILE,
    b"1": Kind.HARDLINK,
    b"2": Kind.SYMLINK,
    b"3": Kind.CHARACTER_DEVICE,
    b"4": Kind.BLOCK_DEVICE,
    b"5": Kind.DIRECTORY,
    b"6": Kind.FIFO,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """name: relative, without "." and ".."; not UTF-8: with surrogate escapes. size: bytes of a
    file, else 0. target: of a link."""

    name: str
    kind: Kind
    size: int
    mode: int
    mtime_ns: int
    target: str


class TarReader:
    """Iterate once; `read` and `skip` are of the member that was handed out last."""

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
        while (header := self._header()) is not None:
            if header.type not in _EXTENSIONS:
                return self._member(header, extended)
            self._extend(header, extended)
        if extended:
            raise self._error("ends behind an extended header")
        self._require_end()
        return None

    def _header(self) -> TarHeader | None:
        """None: a block of zeros, the end."""
        block = self._stream.read(BLOCK_SIZE)
        if not any(block):
            return None
        self._headers += 1
        if self._headers > self._limits.members:
            raise self._error(f"has more than {self._limits.members} members")
        try:
            return parse_header(block)
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

    def _extend(self, header: TarHeader, extended: dict[bytes, bytes]) -> None:
        limit = self._limits.header_bytes
        if header.size > limit:
            raise self._error(f"an extended header of {header.size} bytes; {limit} are the limit")
        raw = self._stream.read(header.size)
        self._stream.skip(-header.size % BLOCK_SIZE)
        if header.type == _LONG_NAME:
            extended.setdefault(b"path", raw.rstrip(b"\0"))
        elif header.type == _LONG_TARGET:
            extended.setdefault(b"linkpath", raw.rstrip(b"\0"))
        else:
            self._extend_pax(raw, header.type == _PAX_GLOBAL, extended)

    def _extend_pax(self, raw: bytes, is_global: bool, extended: dict[bytes, bytes]) -> None:
        try:
            for keyword, value in pax_records(raw):
                if keyword.startswith(b"GNU.sparse"):
                    raise ValueError("sparse members are not read; no engine writes them")
                if keyword not in (b"path", b"linkpath", b"size", b"mtime"):
                    continue
                if is_global:
                    raise ValueError(f"{keyword.decode()} for all members that follow")
                extended[keyword] = value
        except ValueError as exc:
            raise self._error(f"an extended header: {exc}") from exc

    def _member(self, header: TarHeader, extended: dict[bytes, bytes]) -> Member:
        name = self._name(extended.get(b"path", header.name), header.type)
        if header.type not in _KINDS:
            raise self._error(
                f"member {name!r} is of type {header.type!r}, which is not read "
                "(sparse, or of more than one volume)"
            )
        kind = _KINDS[header.type]
        size = self._number(extended, b"size", header.size, name)
        if kind is not Kind.FILE and size:
            raise self._error(f"member {name!r} is a {kind.value} with {size} bytes of content")
        if size > self._limits.unpacked_bytes:
            raise self._error(
                f"member {name!r} has {size} bytes; {self._limits.unpacked_bytes} are the limit"
            )
        target = extended.get(b"linkpath", header.target)
        if len(target) > self._limits.name_bytes:
            raise self._error(f"member {name!r} is a link with a target of {len(target)} bytes")
        self._register(name, kind)
        self._left, self._padding = size, -size % BLOCK_SIZE
        return Member(
            name=name,
            kind=kind,
            size=size,
            mode=header.mode,
            mtime_ns=self._mtime(extended, header.mtime, name),
            target=target.decode("utf-8", "surrogateescape"),
        )

    def _number(self, extended: dict[bytes, bytes], key: bytes, plain: int, name: str) -> int:
        value = extended.get(key)
        if value is None:
            return plain
        if not value.isdigit() or len(value) > 19:
            raise self._error(f"member {name!r}: {key.decode()} is {value[:40]!r}")
        return int(value)

    def _mtime(self, extended: dict[bytes, bytes], plain: int, name: str) -> int:
        """In nanoseconds; before 1970 counts as 1970."""
        whole, _, part = extended.get(b"mtime", str(plain).encode()).partition(b".")
        digits = whole.removeprefix(b"-")
        if not digits.isdigit() or len(digits) > 10 or (part and not part.isdigit()):
            raise self._error(f"member {name!r}: mtime is {whole[:40]!r}")
        if whole.startswith(b"-"):
            return 0
        return int(whole) * _NS + int(part[:9].ljust(9, b"0"))

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
        if name.endswith("/") and kind != b"5":
            raise self._error(f"member {name!r} has the name of a directory and is none")
        if not parts and kind != b"5":
            raise self._error(f"member {name!r} has no name")
        return "/".join(parts)

    def _register(self, name: str, kind: Kind) -> None:
        """Refuse what is there already, and what lies in something that is no directory."""
        parts = name.split("/")
        for count in range(1, len(parts)):
            above = "/".join(parts[:count])
            if self._kinds.setdefault(above, None) not in (None, Kind.DIRECTORY):
                raise self._error(f"member {name!r} lies in {above!r}, which is no directory")
        if name not in self._kinds:
            self._names_bytes += (len(name) + _NAME_COST) * len(parts)
            if self._names_bytes > self._limits.names_bytes:
                raise self._error(
                    f"its names take more than {self._limits.names_bytes} bytes of memory"
                )
        elif self._kinds[name] is not None or kind is not Kind.DIRECTORY:
            raise self._error(f"member {name!r} comes twice")
        self._kinds[name] = kind

    def _error(self, what: str) -> ArchiveError:
        return ArchiveError(f"{self._stream.name}: {what}")
