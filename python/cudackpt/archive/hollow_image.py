"""An image of an archive without its chunk data: header, metadata, index and trailer.

They are put into a file in memory that is as long as the image and has a hole where chunk data is,
so that the core's reader can open it and check all of it. Memory: twice the index.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator
from types import TracebackType
from typing import Self

from cudackpt._core import ImageReader, Manifest, ManifestTask
from cudackpt.archive.compression import ByteStream
from cudackpt.errors import ImageError
from cudackpt.image.checkpoint import image_errors, require_meant
from cudackpt.image.plain_reader import HEADER_SIZE, INDEX_ENTRY_SIZE, TRAILER_SIZE

DIGEST_SIZE = 16  # bytes at the end of an image
_FIRST_TAIL = 16 << 20  # bytes read of the end before it is known where the index begins
_PIECE = 1 << 20
_STORED_HASH_OFFSET = 24  # in an index entry
_WORD = struct.Struct("<Q")
_TRAILER_PLACES = struct.Struct("<QQ16sQ")  # metadata offset, size and hash, index offset


class HollowImage:
    """size: of the image. tail_offset: where what is kept of its end begins."""

    def __init__(self, size: int, header: bytes, tail: Iterable[bytes], length: int, place: str):
        """tail: in pieces, `length` bytes together. place: of the image, for messages."""
        self.size = size
        self.place = place
        self.header = header
        self.tail_offset = size - length
        self.fd = os.memfd_create("cudackpt-image")
        try:
            os.ftruncate(self.fd, size)
            write_at(self.fd, 0, header)
            offset = self.tail_offset
            for piece in tail:
                write_at(self.fd, offset, piece)
                offset += len(piece)
            trailer = read_part(self.fd, size - TRAILER_SIZE, TRAILER_SIZE)
        except BaseException:
            self.close()
            raise
        self.digest = trailer[-DIGEST_SIZE:]
        self.metadata_offset, _, _, self.index_offset = _TRAILER_PLACES.unpack_from(trailer)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def open(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        """The image, checked but for its chunks, which cannot be read through it.

        Raises ImageError, UnsupportedError; each names the image.
        """
        path = f"/proc/self/fd/{self.fd}"
        with image_errors(rename=(path, self.place)):
            image = ImageReader.open(path)
        require_meant(image, manifest, task, self.place)
        return image

    def stored_hash(self, number: int) -> int:
        """Of the stored bytes of a chunk of an image that was opened."""
        offset = self.index_offset + INDEX_ENTRY_SIZE * number + _STORED_HASH_OFFSET
        found: int
        (found,) = _WORD.unpack(os.pread(self.fd, _WORD.size, offset))
        return found

    def metadata(self) -> bytes:
        """As it stands in the image."""
        return read_part(self.fd, self.metadata_offset, self.index_offset - self.metadata_offset)

    def require_tail(self, stream: ByteStream) -> None:
        """Raise ImageError unless what `stream` goes on with is what was kept."""
        for offset, size in _pieces(self.tail_offset, self.size):
            if stream.read(size) != read_part(self.fd, offset, size):
                raise ImageError(f"{self.place}: was changed while it was read")


def read_ends(stream: ByteStream, size: int, limit: int, place: str) -> tuple[bytes, bytes] | int:
    """Header and tail (metadata, index, trailer) of an image that `stream` begins with.

    Where the tail is longer than what is read of the end at first, only its length is returned:
    what lies before is gone then; see read_long_tail. limit: bytes of a tail.

    Raises ImageError.
    """
    if size < HEADER_SIZE + TRAILER_SIZE:
        raise ImageError(f"{place}: too short for an image: {size} bytes")
    header = stream.read(HEADER_SIZE)
    length = min(size - HEADER_SIZE, _FIRST_TAIL)
    stream.skip(size - HEADER_SIZE - length)
    tail = stream.read(length)
    (metadata_offset,) = _WORD.unpack_from(tail, length - TRAILER_SIZE)
    wanted = size - metadata_offset
    if metadata_offset < HEADER_SIZE or wanted < TRAILER_SIZE:
        wanted = TRAILER_SIZE  # the trailer is damaged, and the core's reader says how
    if wanted > limit:
        raise ImageError(
            f"{place}: metadata and index of {wanted} bytes; {limit} are left of the limit"
        )
    return wanted if wanted > length else (header, tail[-wanted:])


def read_long_tail(stream: ByteStream, size: int, length: int) -> tuple[bytes, Iterator[bytes]]:
    """As read_ends, once the length of the tail is known; the tail in pieces."""
    header = stream.read(HEADER_SIZE)
    stream.skip(size - HEADER_SIZE - length)
    return header, (stream.read(part) for _, part in _pieces(size - length, size))


def _pieces(begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Offset and size of each."""
    for offset in range(begin, end, _PIECE):
        yield offset, min(_PIECE, end - offset)


def read_part(fd: int, offset: int, size: int) -> bytes:
    """All of a part of a file. Raises ImageError if the file ends in it."""
    pieces = []
    while size:
        piece = os.pread(fd, size, offset)
        if not piece:
            raise ImageError(f"the file ends at {offset}")
        pieces.append(piece)
        offset += len(piece)
        size -= len(piece)
    return b"".join(pieces)


def write_at(fd: int, offset: int, content: bytes) -> None:
    """Write all of it. Raises OSError."""
    view = memoryview(content)
    while view:
        written = os.pwrite(fd, view, offset)
        view = view[written:]
        offset += written
