# SPDX-License-Identifier: Apache-2.0
"""Images of an archive, and their chunks on the way past: what is kept of an image is its ends,
which the core's reader opens, and the stored bytes of a chunk are checked as they come by.

Both kinds of reading go through a stream once, from front to back: own chunks lie in the order of
their numbers, chunks in other images are put in the order of their places.
"""

from __future__ import annotations

import heapq
import os
from array import array
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Protocol

from gpustasis._core import (
    IMAGE_HEADER_SIZE,
    IMAGE_TRAILER_SIZE,
    ChunkInfo,
    Encoding,
    ImageReader,
    Manifest,
    Source,
)
from gpustasis.archive.stream import ByteStream, FileStream
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.files import open_regular
from gpustasis.image.checkpoint import FoundSource, State, find_manifest, image_errors

_FIRST_TAIL = 16 << 20  # bytes read of the end before it is known where the index begins
_PIECE = 1 << 20
_IN_FLIGHT_BYTES = 32 << 20  # of stored chunks that wait for a thread

_DIGEST_SIZE = 16  # bytes at the end of an image


@dataclass(frozen=True, slots=True, eq=False)
class StoredImage:
    """An image in an archive. place: for messages. size: bytes. reader: knows all but the content
    of chunks. tail_offset: where metadata and index begin. ends: a hash of what was read of
    them."""

    place: str
    size: int
    reader: ImageReader
    tail_offset: int
    ends: bytes

    def require_same_ends(self, header: bytes, tail: Iterable[bytes]) -> None:
        """Raise ImageError unless they are those that the reader was made of."""
        if _hash(header, tail) != self.ends:
            raise ImageError(f"{self.place}: was changed while it was read")

    def damaged(self, number: int, what: str) -> ImageError:
        address = self.reader.chunk(number).address
        return ImageError(f"{self.place}: chunk {number} at {address:#x}: {what}")

    def plain_bytes(self) -> int:
        return sum(region.length for region in self.reader.info.regions)


@dataclass(frozen=True, slots=True, eq=False)
class StoredChunk:
    """One chunk of an image, by number, and its stored bytes."""

    image: StoredImage
    number: int
    info: ChunkInfo
    stored: bytes

    def check(self) -> None:
        """Raise ImageError unless the stored bytes, and what they decode to, are the right ones."""
        with image_errors():
            self.image.reader.check_stored(self.number, self.stored)


def read_image(stream: ByteStream, size: int, limit: int, place: str) -> StoredImage | int:
    """The image that `stream` begins with, of `size` bytes.

    Where metadata and index are longer than what is read of the end at first, only their length is
    returned: what lies before is gone then; see read_long_image. limit: bytes of them.

    Raises ImageError, UnsupportedError.
    """
    if size < IMAGE_HEADER_SIZE + IMAGE_TRAILER_SIZE:
        raise ImageError(f"{place}: too short for an image: {size} bytes")
    header = stream.read(IMAGE_HEADER_SIZE)
    length = min(size - IMAGE_HEADER_SIZE, _FIRST_TAIL)
    stream.skip(size - IMAGE_HEADER_SIZE - length)
    tail = stream.read(length)
    wanted = ImageReader.tail_size(tail[-IMAGE_TRAILER_SIZE:], size)
    if wanted > limit:
        raise ImageError(
            f"{place}: metadata and index of {wanted} bytes; {limit} are left of the limit"
        )
    return wanted if wanted > length else _open(header, tail[-wanted:], size, place)


def read_long_image(stream: ByteStream, size: int, length: int, place: str) -> StoredImage:
    """As read_image, once the length of metadata and index is known."""
    header = stream.read(IMAGE_HEADER_SIZE)
    stream.skip(size - IMAGE_HEADER_SIZE - length)
    return _open(header, stream.read(length), size, place)


def own_chunks(image: StoredImage, stream: ByteStream) -> Iterator[StoredChunk]:
    """Each chunk with bytes in the image that `stream` begins with, and those of zeros, unchecked.

    The zeros between them, and that the rest is what it was at the first pass, are checked here.
    Raises ImageError.
    """
    header = stream.read(IMAGE_HEADER_SIZE)
    position = len(header)
    for number in range(len(image.reader)):
        info = image.reader.chunk(number)
        if info.encoding == Encoding.ZERO:
            yield StoredChunk(image, number, info, b"")
        elif not info.source:
            _require_zeros(image, stream, position, info.offset)
            yield StoredChunk(image, number, info, stream.read(info.stored_size))
            position = info.offset + info.stored_size
    _require_zeros(image, stream, position, image.tail_offset)
    image.require_same_ends(header, _pieces(stream, image.size - image.tail_offset))


class Places:
    """Where some chunks of an image lie in the file of another one. Memory: 12 bytes for
    each, and about 40 while they are gone through."""

    def __init__(self, image: StoredImage) -> None:
        self.image = image
        self._offsets = array("Q")
        self._numbers = array("I")

    def add(self, number: int, offset: int) -> None:
        self._offsets.append(offset)
        self._numbers.append(number)

    def in_order(self) -> Iterator[tuple[int, StoredImage, int]]:
        """Offset, image and number of each chunk, by ascending offsets."""
        for index in sorted(range(len(self._offsets)), key=self._offsets.__getitem__):
            yield self._offsets[index], self.image, self._numbers[index]


def places_by_source(image: StoredImage) -> dict[int, Places]:
    """The chunks in other images, by number of their source."""
    found: dict[int, Places] = {}
    if image.reader.info.sources:
        for number in range(len(image.reader)):
            info = image.reader.chunk(number)
            if info.source:
                found.setdefault(info.source, Places(image)).add(number, info.offset)
    return found


def placed_chunks(places: Sequence[Places], stream: ByteStream) -> Iterator[StoredChunk]:
    """Chunks of any images whose stored bytes lie in the one file that `stream` begins with.

    Raises ImageError if two lie half in one place.
    """
    position, last, stored = 0, -1, b""
    merged = heapq.merge(*(place.in_order() for place in places), key=lambda item: item[0])
    for offset, image, number in merged:
        info = image.reader.chunk(number)
        if offset != last or info.stored_size != len(stored):
            if offset < position:
                raise image.damaged(number, "its stored bytes are partly another chunk's")
            stream.skip(offset - position)
            stored = stream.read(info.stored_size)
            position, last = offset + info.stored_size, offset
        yield StoredChunk(image, number, info, stored)


def checked(chunks: Iterator[StoredChunk], threads: int) -> Iterator[StoredChunk]:
    """The same chunks in the same order, each found sound. threads: 0 for one per processor.

    Raises ImageError for the first that is not, after all before it.
    """
    waiting: deque[tuple[StoredChunk, Future[None]]] = deque()
    held = 0
    with ThreadPoolExecutor(threads or len(os.sched_getaffinity(0))) as pool:
        try:
            for chunk in chunks:
                waiting.append((chunk, pool.submit(chunk.check)))
                held += len(chunk.stored) + chunk.info.plain_size
                while held > _IN_FLIGHT_BYTES:
                    first, done = waiting.popleft()
                    done.result()
                    held -= len(first.stored) + first.info.plain_size
                    yield first
            for first, done in waiting:
                done.result()
                yield first
        finally:
            pool.shutdown(cancel_futures=True)


def _open(header: bytes, tail: bytes, size: int, place: str) -> StoredImage:
    with image_errors():
        reader = ImageReader.from_ends(header, tail, size, place)
    return StoredImage(place, size, reader, size - len(tail), _hash(header, [tail]))


def _hash(header: bytes, tail: Iterable[bytes]) -> bytes:
    hashed = blake2b(header)
    for piece in tail:
        hashed.update(piece)
    return hashed.digest()


def _pieces(stream: ByteStream, size: int) -> Iterator[bytes]:
    for begin in range(0, size, _PIECE):
        yield stream.read(min(_PIECE, size - begin))


def _require_zeros(image: StoredImage, stream: ByteStream, begin: int, end: int) -> None:
    if begin > end:
        raise ImageError(f"{image.place}: a chunk before the end of the one before")
    for piece in _pieces(stream, end - begin):
        if any(piece):
            raise ImageError(f"{image.place}: padding between {begin} and {end} is not zero")


class Parent(Protocol):
    """An earlier checkpoint, or the archive itself. Errors as of CheckpointFiles."""

    @property
    def path(self) -> Path:
        """Of the directory or archive."""

    def checkpoint_id(self) -> bytes | None:
        """None: it has no manifest."""

    def holds(self, source: Source) -> bool:
        """Whether the image that is meant is in it, told by size and digest."""

    def image_streams(self, names: Collection[str]) -> Iterator[tuple[str, ByteStream]]:
        """The images of these names, each from its beginning."""


class Parents:
    """All that were named, in that order; an image that several hold is taken from the first."""

    def __init__(self, named: Sequence[Parent] = ()) -> None:
        self._named = tuple(named)

    def __bool__(self) -> bool:
        return bool(self._named)

    def find(self, source: Source) -> Parent | None:
        return next((parent for parent in self._named if parent.holds(source)), None)

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        """See CheckpointFiles."""
        for parent in self._named:
            try:
                if parent.checkpoint_id() == manifest.parent_id:
                    return str(parent.path), State.RIGHT
            except (ImageError, UnsupportedError):
                continue  # then it is not the one; who reads it hears why
        return None, self._absent

    def find_source(self, source: Source) -> FoundSource:
        """See CheckpointFiles, of one."""
        parent = self.find(source)
        if parent is None:
            return FoundSource(source=source, directory=None, state=self._absent)
        return FoundSource(source=source, directory=parent.path, state=State.RIGHT)

    @property
    def _absent(self) -> State:
        return State.MISSING if self._named else State.OUTSIDE


class DirectoryParent:
    """A Parent that is an image directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoint_id(self) -> bytes | None:
        manifest = find_manifest(self.path)
        return None if manifest is None else manifest.checkpoint_id

    def holds(self, source: Source) -> bool:
        try:
            with open_regular(self.path / source.image_name) as file:
                if file.seek(0, os.SEEK_END) != source.file_size:
                    return False
                file.seek(source.file_size - _DIGEST_SIZE)
                return file.read(_DIGEST_SIZE) == source.digest
        except OSError:
            return False

    def image_streams(self, names: Collection[str]) -> Iterator[tuple[str, ByteStream]]:
        for name in sorted(names):
            path = self.path / name
            try:
                with open_regular(path) as file:
                    yield name, FileStream(file, str(path))
            except OSError as exc:
                raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
