"""Chunks on their way past: where their stored bytes lie, and whether they are what they should be.

Both kinds of reading go through a stream once, from front to back: own chunks lie in the order of
their numbers, chunks of an earlier checkpoint are put in the order of their places.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from cudackpt._core import (
    CorruptDataError,
    Encoding,
    ImageReader,
    decode_chunk,
    hash64,
    hash128,
)
from cudackpt.archive.compression import ByteStream
from cudackpt.archive.hollow_image import HollowImage
from cudackpt.errors import ImageError
from cudackpt.image.plain_reader import HEADER_SIZE

OWN = 0  # the source of a chunk whose stored bytes are in its own image
_IN_FLIGHT_BYTES = 32 << 20  # of stored chunks that wait for a thread
_WHOLE_PIECE = 1 << 20  # bytes of padding read at once

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk of `image`, by number, and the place of its stored bytes: in the file of the
    `source`-th source (OWN: the image's own), at `offset`, `size` bytes."""

    image: OpenImage
    number: int
    address: int
    source: int
    offset: int
    size: int
    plain_size: int
    encoding: Encoding
    plain_hash: bytes

    def damaged(self, what: str) -> ImageError:
        place = self.image.hollow.place
        return ImageError(f"{place}: chunk {self.number} at {self.address:#x}: {what}")

    def require_sound(self, stored: bytes) -> None:
        """Raise ImageError unless the stored bytes, and what they decode to, are the right ones."""
        if self.encoding == Encoding.LZ4:
            if hash64(stored) != self.image.hollow.stored_hash(self.number):
                raise self.damaged("stored bytes do not match their checksum")
            plain = bytearray(self.plain_size)
            try:
                decode_chunk(self.encoding, stored, plain)
            except CorruptDataError as exc:
                raise self.damaged(str(exc)) from exc
            found = hash128(plain)
        else:
            found = hash128(stored)
        if found != self.plain_hash:
            raise self.damaged("content does not match its checksum")


@dataclass(frozen=True, slots=True)
class OpenImage:
    """An image of an archive, opened: what the core's reader knows of it, and its parts."""

    pid: int
    reader: ImageReader
    hollow: HollowImage

    def chunk(self, number: int) -> StoredChunk:
        """The place of a chunk. Every reader of chunks asks here."""
        found = self.reader.chunk(number)
        return StoredChunk(
            image=self,
            number=number,
            address=found.address,
            source=found.source,
            offset=found.offset,
            size=found.stored_size,
            plain_size=found.plain_size,
            encoding=found.encoding,
            plain_hash=found.hash,
        )

    def plain_bytes(self) -> int:
        return sum(region.length for region in self.reader.info.regions)


def own_chunks(image: OpenImage, stream: ByteStream) -> Iterator[tuple[StoredChunk, bytes]]:
    """Each chunk with bytes in the image, which `stream` begins with, and these bytes, unchecked.

    The zeros between them, and that the rest is what it was at the first pass, are checked here;
    so are chunks of zeros. Raises ImageError.
    """
    if stream.read(HEADER_SIZE) != image.hollow.header:
        raise ImageError(f"{image.hollow.place}: was changed while it was read")
    zeros: dict[int, bytes] = {}
    position = HEADER_SIZE
    for number in range(len(image.reader)):
        chunk = image.chunk(number)
        if chunk.encoding == Encoding.ZERO:
            size = chunk.plain_size
            if zeros.setdefault(size, hash128(bytes(size))) != chunk.plain_hash:
                raise chunk.damaged("content does not match its checksum")
        elif chunk.source == OWN:
            _require_zeros(stream, position, chunk.offset, image)
            yield chunk, stream.read(chunk.size)
            position = chunk.offset + chunk.size
    _require_zeros(stream, position, image.hollow.tail_offset, image)
    image.hollow.require_tail(stream)


def placed_chunks(
    chunks: list[tuple[int, int, OpenImage]], stream: ByteStream
) -> Iterator[tuple[StoredChunk, bytes]]:
    """Chunks of any images whose stored bytes lie in the one image that `stream` begins with.

    chunks: offset, number, image; sorted here. Raises ImageError if two lie half in one place.
    """
    chunks.sort(key=lambda item: item[0])
    position, last, stored = 0, -1, b""
    for offset, number, image in chunks:
        chunk = image.chunk(number)
        if offset != last or chunk.size != len(stored):
            if offset < position:
                raise chunk.damaged("its stored bytes are partly another chunk's")
            stream.skip(offset - position)
            stored = stream.read(chunk.size)
            position, last = offset + chunk.size, offset
        yield chunk, stored


def checked(
    chunks: Iterator[tuple[StoredChunk, bytes]], threads: int
) -> Iterator[tuple[StoredChunk, bytes]]:
    """The same chunks in the same order, each found sound. threads: 0 for one per processor.

    Raises ImageError for the first that is not, after all before it.
    """
    waiting: deque[tuple[StoredChunk, bytes, Future[None]]] = deque()
    held = 0
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        try:
            for chunk, stored in chunks:
                waiting.append((chunk, stored, pool.submit(chunk.require_sound, stored)))
                held += len(stored) + chunk.plain_size
                while held > _IN_FLIGHT_BYTES:
                    first, content, done = waiting.popleft()
                    done.result()
                    held -= len(content) + first.plain_size
                    yield first, content
            for first, content, done in waiting:
                done.result()
                yield first, content
        finally:
            pool.shutdown(cancel_futures=True)


def by_source(image: OpenImage) -> dict[int, list[tuple[int, int, OpenImage]]]:
    """Offset and number of each chunk that is not in the image itself, by number of its source."""
    found: dict[int, list[tuple[int, int, OpenImage]]] = {}
    if image.reader.totals.ref.chunks:
        for number in range(len(image.reader)):
            chunk = image.chunk(number)
            if chunk.source != OWN:
                found.setdefault(chunk.source, []).append((chunk.offset, number, image))
    return found


def _require_zeros(stream: ByteStream, begin: int, end: int, image: OpenImage) -> None:
    while begin < end:
        size = min(end - begin, _WHOLE_PIECE)
        if any(stream.read(size)):
            raise ImageError(
                f"{image.hollow.place}: padding between {begin} and {begin + size} is not zero"
            )
        begin += size
    if begin != end:
        raise ImageError(f"{image.hollow.place}: a chunk before the end of the one before")
