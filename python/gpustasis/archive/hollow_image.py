"""An image of an archive without its chunk data: header, metadata, index, trailer.

They are put into a file in memory that is as long as that of the archive and has a hole where
chunk data is, so that the core's reader can open them and check all of that. Memory: twice the index.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator

from gpustasis._core import ImageReader, Manifest, ManifestTask
from gpustasis.archive.stream import ByteStream
from gpustasis.errors import ArchiveError, ImageError
from gpustasis.image.checkpoint import image_errors, require_meant
from gpustasis.image.plain_reader import HEADER_SIZE, INDEX_ENTRY_SIZE, TRAILER_SIZE

DIGEST_SIZE = 16  # bytes at the end of an image
_FIRST_TAIL = 16 << 20  # bytes read of the end before it is known where the index begins
_PIECE = 1 << 20
_STORED_HASH_OFFSET = 24  # in an index entry
_WORD = struct.Struct("<Q")
_TRAILER_PLACES = struct.Struct("<QQ16sQ")  # metadata offset, size and hash, index offset


class HollowFile:
    """size: of the file in the archive. tail_offset: where what is kept of its end begins.
    digest: its last bytes. fd: of the file in memory, open until closed."""

    def __init__(
        self, size: int, header: bytes, tail: Iterable[bytes], length: int, place: str
    ) -> None:
        """tail: in pieces, `length` bytes together. place: of the file, for messages."""
        self.size = size
        self.place = place
        self.header = header
        self.tail_offset = size - length
        try:
            self.fd = os.memfd_create("gpustasis-image")
        except OSError as exc:
            raise ArchiveError(f"{place}: cannot be looked at: {exc.strerror}") from exc
        try:
            os.ftruncate(self.fd, size)
            write_at(self.fd, 0, header)
            offset = self.tail_offset
            for piece in tail:
                write_at(self.fd, offset, piece)
                offset += len(piece)
            self.digest = read_part(self.fd, size - DIGEST_SIZE, DIGEST_SIZE)
        except OSError as exc:
            self.close()
            raise ArchiveError(f"{place}: cannot be looked at: {exc.strerror}") from exc
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
        self.fd = -1

    def require_header(self, stream: ByteStream) -> None:
        """Raise ImageError unless what `stream` begins with is what was kept."""
        if stream.read(len(self.header)) != self.header:
            raise ImageError(f"{self.place}: was changed while it was read")

    def require_tail(self, stream: ByteStream) -> None:
        """Raise ImageError unless what `stream` goes on with is what was kept."""
        for offset, size in _pieces(self.tail_offset, self.size):
            if stream.read(size) != read_part(self.fd, offset, size):
                raise ImageError(f"{self.place}: was changed while it was read")


class HollowImage:
    """An image by what is kept of it."""

    def __init__(self, file: HollowFile) -> None:
        self.file = file
        self.place = file.place
        self.header = file.header
        self._fd = file.fd
        trailer = read_part(file.fd, file.size - TRAILER_SIZE, TRAILER_SIZE)
        self.metadata_offset, _, _, self.index_offset = _TRAILER_PLACES.unpack_from(trailer)

    def open(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        """The image, checked but for its chunks, which cannot be read through it.

        Raises ImageError, UnsupportedError; each names the file.
        """
        with image_errors():
            image = ImageReader.open_part(self._fd, 0, self.file.size, self.place)
        require_meant(image, manifest, task, self.place)
        return image

    def stored_hash(self, number: int) -> int:
        """Of the stored bytes of a chunk of an image that was opened."""
        offset = self.index_offset + INDEX_ENTRY_SIZE * number + _STORED_HASH_OFFSET
        found: int
        (found,) = _WORD.unpack(os.pread(self._fd, _WORD.size, offset))
        return found

    def metadata(self) -> bytes:
        """As it stands in the image."""
        return read_part(self._fd, self.metadata_offset, self.index_offset - self.metadata_offset)


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
