# SPDX-License-Identifier: Apache-2.0
"""The bytes of an archive, unpacked, as a stream with bounds.

Sources: RFC 1952 (gzip), RFC 8878 (zstd); the other magics as in file(1).
"""

from __future__ import annotations

import gzip
import os
import zlib
from dataclasses import dataclass
from enum import StrEnum
from typing import BinaryIO, Protocol, cast

import zstandard

from gpustasis.errors import ArchiveError, ImageError

TAR_MAGIC_OFFSET = 257
_STREAM_MAGIC = b"\x93GPUSST\n"  # docs/format.md, "Streams"
_TAR_MAGIC = b"ustar"
_HEAD_SIZE = 512
_READ_SIZE = 1 << 20  # bytes asked for at once when what is read is thrown away
_NOT_READ = {
    b"\xfd7zXZ\0": "xz",
    b"BZh": "bzip2",
    b"\x04\x22\x4d\x18": "lz4",
    b"PK\x03\x04": "zip",
}


MIB = 1 << 20
GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one archive; what goes beyond one is an ArchiveError.

    members: headers of any kind. names_bytes: of memory for all names, the directories they imply
    and the targets of links, which are kept to find a name that comes twice. name_bytes: of one
    name or target; name_parts: directories in it. header_bytes: of one extended header (pax, GNU
    long name). kept_bytes: of the small files that are read whole; kept_file_bytes: of one of them.
    images: how many. index_bytes: of all images' metadata and indexes. unpacked_bytes: of the whole
    archive. An archive that unpacks to more than ratio_free_bytes may be at most ratio times
    smaller than what comes out of it: gzip cannot do better, and what zstd makes smaller still is
    empty. window_bytes: of zstd's memory. padding_bytes: behind the end.
    """

    members: int = 1 << 18
    names_bytes: int = 64 * MIB
    name_bytes: int = 4096
    name_parts: int = 32
    header_bytes: int = 1 * MIB
    kept_bytes: int = 64 * MIB
    kept_file_bytes: int = 4 * MIB
    images: int = 4096
    index_bytes: int = 512 * MIB
    unpacked_bytes: int = 16 << 40
    ratio: int = 1024
    ratio_free_bytes: int = 16 * GIB
    window_bytes: int = 128 * MIB
    padding_bytes: int = 1 * MIB


DEFAULT_LIMITS = Limits()


class Compression(StrEnum):
    """Of the whole archive, told from its first bytes."""

    NONE = "none"
    GZIP = "gzip"
    ZSTD = "zstd"


class ByteStream(Protocol):
    """Bytes from front to back."""

    def read(self, size: int) -> bytes:
        """The next `size` bytes. Raises ImageError if there are fewer."""

    def skip(self, size: int) -> None:
        """Go on behind the next `size` bytes. Raises ImageError if there are fewer."""


class _Readable(Protocol):
    def read(self, size: int, /) -> bytes: ...


def detect(file: BinaryIO, name: str) -> Compression:
    """Which compression `file` has, from its first bytes; it is left at its beginning.

    Raises ArchiveError if it is neither a tar archive nor one packed with gzip or zstd.
    """
    file.seek(0)
    head = file.read(_HEAD_SIZE)
    file.seek(0)
    if not head:  # a runtime that was killed just now has made it and written nothing
        raise ArchiveError(f"{name}: is cut short: it is empty")
    if head.startswith(b"\x1f\x8b"):
        return Compression.GZIP
    if head.startswith(b"\x28\xb5\x2f\xfd"):
        return Compression.ZSTD
    if head[TAR_MAGIC_OFFSET:].startswith(_TAR_MAGIC):
        return Compression.NONE
    for magic, other in _NOT_READ.items():
        if head.startswith(magic):
            raise ArchiveError(
                f"{name}: is packed with {other}, and only tar, gzip and zstd are read; "
                "unpack it first"
            )
    if head.startswith(_STREAM_MAGIC):
        raise ArchiveError(
            f"{name}: is a stream of `checkpoint -o`; `gpustasis restore -i {name}` restores it"
        )
    raise ArchiveError(f"{name}: is no checkpoint archive: neither tar nor gzip nor zstd")


class UnpackedStream:
    """The bytes of an archive as tar wrote them, counted, and stopped at the limits.

    Memory: the decompressor's window and what one `read` asks for.
    """

    def __init__(self, file: BinaryIO, compression: Compression, limits: Limits, name: str) -> None:
        """file: at its beginning, and not used by anybody else."""
        self.name = name
        self.position = 0  # bytes handed out or skipped
        self._file = file
        self._limits = limits
        self._size = os.fstat(file.fileno()).st_size
        self._seekable = compression is Compression.NONE
        self._source: _Readable = file
        if compression is Compression.GZIP:
            self._source = cast(_Readable, gzip.GzipFile(fileobj=file, mode="rb"))
        elif compression is Compression.ZSTD:
            unpacker = zstandard.ZstdDecompressor(max_window_size=limits.window_bytes)
            self._source = unpacker.stream_reader(file, read_across_frames=True)

    def read(self, size: int) -> bytes:
        """The next `size` bytes. Raises ArchiveError if there are fewer, or a limit is passed."""
        got = self.read_some(size)
        if len(got) != size:
            raise ArchiveError(
                f"{self.name}: is cut short: {size - len(got)} bytes are missing at the end of "
                f"{self.position} unpacked ones"
            )
        return got

    def read_some(self, size: int) -> bytes:
        """As read, but fewer at the end of the archive."""
        self._count(size)
        pieces = []
        missing = size
        while missing and (piece := self._read(missing)):
            pieces.append(piece)
            missing -= len(piece)
        self.position -= missing
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def skip(self, size: int) -> None:
        """Go on behind the next `size` bytes. Raises as read."""
        if self._seekable:
            self._count(size)
            if self.position > self._size:
                raise ArchiveError(
                    f"{self.name}: is cut short: {self._size} bytes, and {self.position} are needed"
                )
            self._file.seek(size, os.SEEK_CUR)
            return
        while size:
            size -= len(self.read(min(size, _READ_SIZE)))

    def _read(self, size: int) -> bytes:
        try:
            return self._source.read(size)
        except (gzip.BadGzipFile, EOFError, zlib.error, zstandard.ZstdError) as exc:
            raise ArchiveError(
                f"{self.name}: does not unpack, {self.position} bytes in: {exc}"
            ) from exc
        except OSError as exc:
            raise ArchiveError(f"{self.name}: cannot be read: {exc.strerror}") from exc

    def _count(self, size: int) -> None:
        limits = self._limits
        self.position += size
        if self.position > limits.unpacked_bytes:
            raise ArchiveError(
                f"{self.name}: unpacks to {self.position} bytes or more, and "
                f"{limits.unpacked_bytes} are the limit"
            )
        if self._seekable or self.position <= limits.ratio_free_bytes:
            return
        if self.position > limits.ratio * self._size:
            raise ArchiveError(
                f"{self.name}: its {self._size} bytes unpack to {self.position} or more, "
                f"and {limits.ratio} times its size is the limit; if you trust it, unpack it with "
                "tar and give the directory"
            )


class FileStream:
    """A ByteStream of an ordinary file."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self._file = file
        self._name = name

    def read(self, size: int) -> bytes:
        got = self._file.read(size)
        if len(got) != size:
            raise ImageError(f"{self._name}: ends {size - len(got)} bytes too early")
        return got

    def skip(self, size: int) -> None:
        self._file.seek(size, os.SEEK_CUR)
