"""An image that needs no other, written from chunks that come in any order.

The size of every stored chunk is known from the index before the first one comes, so each has its
place. docs/format.md says what is written.
"""

from __future__ import annotations

import os
import struct
from array import array
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Self

import xxhash

from gpustasis._core import Encoding
from gpustasis.archive.hollow_image import write_at
from gpustasis.archive.stored_chunks import OpenImage, StoredChunk
from gpustasis.image.plain_fields import GPU, NO_ID, START
from gpustasis.image.plain_reader import (
    HEADER_SIZE,
    INDEX_ENTRY,
    METADATA,
    REGION,
    TRAILER,
    TRAILER_MAGIC,
)

_HASHED_HEADER = 240  # bytes
_IDS = slice(START.size, START.size + 32)  # checkpoint_id, parent_id
_ALIGNMENT = struct.Struct("<I")
_ALIGNMENT_OFFSET = 72
_COUNTS = struct.Struct("<II")  # region_count, gpu_count
_COUNTS_OFFSET = 32
_NO_SOURCES = slice(88, 92)  # source_count
_ENTRIES_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenImage:
    file_size: int
    digest: bytes


class FlatImage:
    """The flat copy of `image`, being written to `path`, which must not exist."""

    def __init__(self, image: OpenImage, path: Path) -> None:
        """Raises OSError."""
        self._image = image
        self._alignment: int
        (self._alignment,) = _ALIGNMENT.unpack_from(image.hollow.header, _ALIGNMENT_OFFSET)
        self._offsets = array("Q", bytes(8 * len(image.reader)))
        self._end = self._align(HEADER_SIZE)
        self._missing = 0
        for number in range(len(image.reader)):
            chunk = image.chunk(number)
            if chunk.encoding != Encoding.ZERO:
                self._offsets[number] = self._end
                self._end = self._align(self._end + chunk.size)
                self._missing += 1
        self._fd = os.open(
            path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        os.close(self._fd)

    def put(self, chunk: StoredChunk, stored: bytes) -> None:
        """Write the stored bytes of a chunk, each once. Raises OSError."""
        write_at(self._fd, self._offsets[chunk.number], stored)
        self._missing -= 1

    def finish(self) -> WrittenImage:
        """Write the rest, once every chunk was put, and sync. Raises OSError."""
        assert self._missing == 0, f"{self._missing} chunks were not put"
        header = self._header()
        write_at(self._fd, 0, header)
        metadata = self._metadata()
        write_at(self._fd, self._end, metadata)
        index_offset = self._end + len(metadata)
        position, index_hash = self._write_index(index_offset)
        trailer = TRAILER.pack(
            self._end,
            len(metadata),
            xxhash.xxh3_128_digest(metadata),
            index_offset,
            len(self._image.reader),
            index_hash,
            header[_HASHED_HEADER:],
            position + TRAILER.size + len(NO_ID),
            bytes(16),
            TRAILER_MAGIC,
        )
        digest = xxhash.xxh3_128_digest(trailer)
        write_at(self._fd, position, trailer + digest)
        os.fsync(self._fd)
        return WrittenImage(file_size=position + TRAILER.size + len(digest), digest=digest)

    def _header(self) -> bytes:
        """Without features, and so without a parent."""
        old = self._image.hollow.header
        magic, version, size, _required, _optional = START.unpack_from(old)
        checkpoint_id = old[_IDS][: len(NO_ID)]
        hashed = START.pack(magic, version, size, 0, 0) + checkpoint_id + NO_ID
        hashed += old[len(hashed) : _HASHED_HEADER]
        return hashed + xxhash.xxh3_128_digest(hashed)

    def _metadata(self) -> bytes:
        old = self._image.hollow.metadata()
        regions, gpus = _COUNTS.unpack_from(old, _COUNTS_OFFSET)
        new = bytearray(old[: METADATA.size + GPU.size * gpus + REGION.size * regions])
        new[_NO_SOURCES] = bytes(4)
        return bytes(new)

    def _write_index(self, offset: int) -> tuple[int, bytes]:
        """Where it ends, and its hash."""
        hashed = xxhash.xxh3_128()
        count = len(self._image.reader)
        for begin in range(0, count, _ENTRIES_AT_ONCE):
            numbers = range(begin, min(begin + _ENTRIES_AT_ONCE, count))
            entries = b"".join(map(self._entry, numbers))
            hashed.update(entries)
            write_at(self._fd, offset, entries)
            offset += len(entries)
        return offset, hashed.digest()

    def _entry(self, number: int) -> bytes:
        chunk = self._image.chunk(number)
        packed = chunk.encoding == Encoding.LZ4
        return INDEX_ENTRY.pack(
            chunk.plain_hash,
            self._offsets[number],
            self._image.hollow.stored_hash(number) if packed else 0,
            chunk.size,
            chunk.encoding.value,
            0,
            0,
        )

    def _align(self, offset: int) -> int:
        return -(-offset // self._alignment) * self._alignment
