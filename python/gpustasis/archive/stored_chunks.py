"""Chunks on their way past: where their stored bytes lie, and whether they are what they should be.

Both kinds of reading go through a stream once, from front to back: own chunks lie in the order of
their numbers, chunks of an earlier checkpoint are put in the order of their places.
"""

from __future__ import annotations

import heapq
import os
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from gpustasis._core import (
    CorruptDataError,
    Encoding,
    ImageReader,
    decode_chunk,
    hash64,
    hash128,
)
from gpustasis.archive.hollow_image import HollowFile, HollowImage
from gpustasis.archive.stream import ByteStream
from gpustasis.errors import ImageError

_IN_FLIGHT_BYTES = 32 << 20  # of stored chunks that wait for a thread
_WHOLE_PIECE = 1 << 20  # bytes of padding read at once

Tag = TypeVar("Tag")


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """One chunk of `image`, by number, and the place of its stored bytes: in the file of the
    `source`-th source (0: in the image file), at `offset`, `size` bytes."""

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
    """Each chunk with bytes in the image file, which `stream` begins with, and these bytes,
    unchecked.

    The zeros between them, chunks of zeros, and that the rest is what it was at the first pass, are
    checked here. Raises ImageError.
    """
    file = image.hollow.file
    file.require_header(stream)
    zeros: dict[int, bytes] = {}
    position = len(file.header)
    for number in range(len(image.reader)):
        chunk = image.chunk(number)
        if chunk.encoding == Encoding.ZERO:
            size = chunk.plain_size
            if zeros.setdefault(size, hash128(bytes(size))) != chunk.plain_hash:
                raise chunk.damaged("content does not match its checksum")
        elif chunk.source == 0:
            _require_zeros(stream, position, chunk.offset, file)
            yield chunk, stream.read(chunk.size)
            position = chunk.offset + chunk.size
    _require_zeros(stream, position, file.tail_offset, file)
    file.require_tail(stream)


class Places:
    """Where some chunks of an image lie in one file of an earlier checkpoint. Memory: 12 bytes for
    each, and about 40 while they are gone through."""

    def __init__(self, image: OpenImage) -> None:
        self.image = image
        self._offsets = array("Q")
        self._numbers = array("I")

    def add(self, chunk: StoredChunk) -> None:
        self._offsets.append(chunk.offset)
        self._numbers.append(chunk.number)

    def in_order(self) -> Iterator[tuple[int, StoredChunk]]:
        """Offset and chunk, by ascending offsets."""
        for index in sorted(range(len(self._offsets)), key=self._offsets.__getitem__):
            yield self._offsets[index], self.image.chunk(self._numbers[index])


def placed_chunks(
    places: Sequence[Places], stream: ByteStream
) -> Iterator[tuple[StoredChunk, bytes]]:
    """Chunks of any images whose stored bytes lie in the one file that `stream` begins with.

    Raises ImageError if two lie half in one place.
    """
    position, last, stored = 0, -1, b""
    merged = heapq.merge(*(place.in_order() for place in places), key=lambda item: item[0])
    for offset, chunk in merged:
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


def by_source(image: OpenImage) -> dict[int, Places]:
    """The chunks in earlier checkpoints, by number of their source."""
    found: dict[int, Places] = {}
    if image.reader.totals.ref.chunks:
        for number in range(len(image.reader)):
            chunk = image.chunk(number)
            if chunk.source != 0:
                found.setdefault(chunk.source, Places(image)).add(chunk)
    return found


def _require_zeros(stream: ByteStream, begin: int, end: int, file: HollowFile) -> None:
    while begin < end:
        size = min(end - begin, _WHOLE_PIECE)
        if any(stream.read(size)):
            raise ImageError(
                f"{file.place}: padding between {begin} and {begin + size} is not zero"
            )
        begin += size
    if begin != end:
        raise ImageError(f"{file.place}: a chunk before the end of the one before")
