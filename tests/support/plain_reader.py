# SPDX-License-Identifier: Apache-2.0
"""A second reader of images, in plain Python, written from docs/format.md alone.

It shares no code with the C++ reader: tests hold the two against each other. Slow; for files that
fit in memory. plain_manifest.py reads manifests.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass

import lz4.block  # type: ignore[import-untyped]
import xxhash

from gpustasis.errors import ImageError
from support.plain_manifest import (
    CPU_MEMORY,
    FEATURE_ALIKE,
    FEATURE_CPU_MEMORY,
    FEATURE_DEVICES,
    FEATURE_FILES,
    FEATURE_PARENT,
    FILES,
    GPU,
    MAX_GPUS,
    NO_ID,
    START,
    check_start,
    parse_gpus,
    require,
    text,
)

HEADER_SIZE = 256
TRAILER_SIZE = 128
INDEX_ENTRY_SIZE = 40
ZERO, LZ4, RAW = range(3)

_IMAGE_MAGIC = b"\x93GPUSIM\n"
TRAILER_MAGIC = b"GPUSEND\n"

_HEADER = struct.Struct("<16s16sIIIB163s")
METADATA = struct.Struct("<Q16sIIII16s32sI4s")
REGION = struct.Struct("<QQIB3s")
_SOURCE = struct.Struct("<16s16sQIHBB")
INDEX_ENTRY = struct.Struct("<16sQQIBHB")
TRAILER = struct.Struct("<QQ16sQQ16s16sQ16s8s")

DEVICE = 2  # kind of a region
STRIPE = 64 << 20  # of a GPU's memory
_MAX_CHUNKS = 1 << 25
_MAX_REGIONS = 1 << 20
_MAX_SOURCES = 65535
_MAX_ADDRESS = 1 << 57


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRegion:
    """A run of memory in bytes. kind: 0 private, 1 shared anonymous."""

    address: int
    length: int
    protection: int
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSource:
    """Another image; depth of its directory in parent links, 0 of the same checkpoint."""

    checkpoint_id: bytes
    digest: bytes
    file_size: int
    pid: int
    depth: int
    kind: int

    @property
    def name(self) -> str:
        return f"gpustasis-{'memory-' if self.kind == CPU_MEMORY else ''}{self.pid}.img"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainChunk:
    """One chunk, its place in memory and in a file: source 0 this one, n that of sources[n - 1]."""

    address: int
    plain_size: int
    plain_hash: bytes
    offset: int
    stored_hash: int
    stored_size: int
    encoding: int
    source: int


# Gives the whole file of a source; raises what it likes if there is none.
ReadSource = Callable[[PlainSource], bytes]


class PlainImage:
    """An image held in memory, checked when made but for the content of its chunks."""

    alignment: int
    chunk_size: int

    def __init__(self, file: bytes, read_source: ReadSource | None = None) -> None:
        """read_source: needed for chunks with a source. Raises ImageError, UnsupportedError."""
        self._file = file
        self._read_source = read_source
        self._source_files: dict[int, bytes] = {}
        require(len(file) >= HEADER_SIZE + TRAILER_SIZE, "too short for an image")
        self._parse_header()
        self._parse_trailer()
        self._parse_metadata()
        self.chunks = self._parse_index()

    def read_chunk(self, index: int) -> bytes:
        """The plain bytes of a chunk. Raises ImageError if a hash does not match."""
        chunk = self.chunks[index]
        file = self._file if chunk.source == 0 else self._source_file(chunk.source)
        stored = file[chunk.offset : chunk.offset + chunk.stored_size]
        if chunk.encoding == ZERO:
            plain = bytes(chunk.plain_size)
        elif chunk.encoding == RAW:
            plain = stored
        else:
            require(xxhash.xxh3_64_intdigest(stored) == chunk.stored_hash, "stored bytes damaged")
            try:
                plain = lz4.block.decompress(stored, uncompressed_size=chunk.plain_size)
            except lz4.block.LZ4BlockError as exc:
                raise ImageError(f"chunk {index} does not decode: {exc}") from exc
        require(len(plain) == chunk.plain_size, "chunk decodes to another size")
        require(xxhash.xxh3_128_digest(plain) == chunk.plain_hash, "content damaged")
        return plain

    def verify(self) -> None:
        """Check every source, every chunk and all padding. Raises ImageError."""
        for number in range(1, len(self.sources) + 1):
            self._source_file(number)
        end = HEADER_SIZE
        for index, chunk in enumerate(self.chunks):
            self.read_chunk(index)
            if chunk.encoding != ZERO and chunk.source == 0:
                _check_padding(self._file[end : chunk.offset])
                end = chunk.offset + chunk.stored_size
        _check_padding(self._file[end : self._metadata_offset])

    def _source_file(self, number: int) -> bytes:
        """The file of the number-th source, found to be the one that is meant."""
        if number not in self._source_files:
            source = self.sources[number - 1]
            require(self._read_source is not None, "the files of its sources are needed")
            assert self._read_source is not None
            file = self._read_source(source)
            same = len(file) == source.file_size and file[-16:] == source.digest
            require(
                same,
                f"{source.name} of checkpoint "
                f"{source.checkpoint_id.hex()}, {source.depth} links away, is another file",
            )
            self._source_files[number] = file
        return self._source_files[number]

    def _parse_header(self) -> None:
        header = self._file[:HEADER_SIZE]
        required = check_start(
            header,
            _IMAGE_MAGIC,
            HEADER_SIZE,
            header[240:],
            header[:240],
            FEATURE_PARENT | FEATURE_CPU_MEMORY | FEATURE_ALIKE | FEATURE_FILES | FEATURE_DEVICES,
        )
        self.has_parent = bool(required & FEATURE_PARENT)
        self.has_cpu_memory = bool(required & FEATURE_CPU_MEMORY)
        self.has_alike = bool(required & FEATURE_ALIKE)
        self.has_devices = bool(required & FEATURE_DEVICES)
        (
            self.checkpoint_id,
            self.parent_id,
            self.pid,
            self.chunk_size,
            self.alignment,
            self.kind,
            reserved,
        ) = _HEADER.unpack_from(header, START.size)
        require(not any(reserved), "a reserved byte is not zero")
        require(self.kind <= FILES, "unknown kind of memory")
        has_files = bool(required & FEATURE_FILES)
        require((self.kind == FILES) == has_files, "kind and features")
        require((self.parent_id != NO_ID) == self.has_parent, "parent and feature disagree")
        require(1 <= self.pid < 1 << 31, "pid out of range")
        require(_is_power(self.chunk_size, 4096, 4 << 20), "chunk size out of range")
        require(_is_power(self.alignment, 1, 4096), "alignment out of range")

    def _parse_trailer(self) -> None:
        trailer = self._file[-TRAILER_SIZE:]
        self.digest = trailer[112:]
        require(xxhash.xxh3_128_digest(trailer[:112]) == self.digest, "trailer damaged")
        (
            self._metadata_offset,
            self._metadata_size,
            self._metadata_hash,
            self._index_offset,
            self._chunk_count,
            self._index_hash,
            header_hash,
            file_size,
            reserved,
            magic,
        ) = TRAILER.unpack_from(trailer)
        require(magic == TRAILER_MAGIC and not any(reserved), "trailer malformed")
        require(header_hash == self._file[240:256], "header and trailer do not belong together")
        require(file_size == len(self._file), "file has another size than it should have")
        require(self._chunk_count <= _MAX_CHUNKS, "too many chunks")
        index_end = self._index_offset + INDEX_ENTRY_SIZE * self._chunk_count
        require(index_end == file_size - TRAILER_SIZE, "index is not where it should be")
        metadata_end = self._metadata_offset + self._metadata_size
        require(metadata_end == self._index_offset, "metadata is not where it should be")

    def _parse_metadata(self) -> None:
        raw = self._file[self._metadata_offset : self._index_offset]
        require(xxhash.xxh3_128_digest(raw) == self._metadata_hash, "metadata damaged")
        require(len(raw) >= METADATA.size, "metadata too short")
        (
            self.start_time,
            self.boot_id,
            self.state_before,
            self.driver_api_version,
            region_count,
            gpu_count,
            comm,
            driver_version,
            source_count,
            reserved,
        ) = METADATA.unpack_from(raw)
        require(not any(reserved), "a reserved byte is not zero")
        require(self.state_before <= 3, "unknown state")
        require(region_count <= _MAX_REGIONS and gpu_count <= MAX_GPUS, "too many regions, GPUs")
        require(source_count <= _MAX_SOURCES, "too many sources")
        regions_offset = METADATA.size + GPU.size * gpu_count
        sources_offset = regions_offset + REGION.size * region_count
        require(len(raw) == sources_offset + _SOURCE.size * source_count, "metadata size")
        self.comm = text(comm)
        self.driver_version = text(driver_version)
        self.gpus = parse_gpus(raw, METADATA.size, gpu_count)
        self.regions = _parse_regions(raw[regions_offset:sources_offset])
        self.sources = _parse_sources(raw[sources_offset:])
        self._check_devices()
        self._check_sources()
        kinds = {self.kind, *(source.kind for source in self.sources)}
        require((CPU_MEMORY in kinds) == self.has_cpu_memory, "kinds and features")

    def _check_devices(self) -> None:
        of_devices = [region for region in self.regions if region.kind == DEVICE]
        require(bool(of_devices) == self.has_devices, "regions and features")
        require(not of_devices or len(of_devices) == len(self.regions), "memory of two kinds")
        require(not of_devices or self.kind == 0, "memory of two kinds")
        sizes = [0] * len(self.gpus)
        for region in of_devices:
            stripe, number = region.address >> 34, region.address >> 26 & 0xFF
            require(region.address & (STRIPE - 1) == 0, "not a stripe")
            require(number < len(sizes), "no such GPU")
            require(sizes[number] == stripe * STRIPE and region.length <= STRIPE, "not in order")
            sizes[number] += region.length

    def _check_sources(self) -> None:
        depths = {source.depth for source in self.sources}
        require(self.has_parent or depths <= {0}, "sources without a parent")
        require((0 in depths) == self.has_alike, "sources and features")
        for source in self.sources:
            if source.depth == 0:
                require(source.checkpoint_id == self.checkpoint_id, "source of another checkpoint")
                same = (source.pid, source.kind) == (self.pid, self.kind)
                require(not same, "an image is its own source")

    def _parse_index(self) -> tuple[PlainChunk, ...]:
        raw = self._file[self._index_offset : -TRAILER_SIZE]
        require(xxhash.xxh3_128_digest(raw) == self._index_hash, "index damaged")
        count = sum(-(-region.length // self.chunk_size) for region in self.regions)
        require(count == self._chunk_count, "number of chunks does not follow from the regions")
        places = [
            (address, min(self.chunk_size, region.address + region.length - address))
            for region in self.regions
            for address in range(region.address, region.address + region.length, self.chunk_size)
        ]
        chunks = []
        expected = self._align(HEADER_SIZE)
        for entry, (address, size) in zip(INDEX_ENTRY.iter_unpack(raw), places, strict=True):
            chunk = _parse_entry(entry, address, size)
            if chunk.source != 0:
                self._check_reference(chunk)
            elif chunk.encoding != ZERO:
                require(chunk.offset == expected, "chunk is not where it should be")
                expected = self._align(chunk.offset + chunk.stored_size)
            chunks.append(chunk)
        require(expected == self._metadata_offset, "chunks do not fill the data area")
        return tuple(chunks)

    def _check_reference(self, chunk: PlainChunk) -> None:
        require(chunk.source <= len(self.sources), "a source that is not there")
        end = chunk.offset + chunk.stored_size
        require(end <= self.sources[chunk.source - 1].file_size, "chunk beyond its source's end")

    def _align(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment


def _parse_entry(
    entry: tuple[bytes, int, int, int, int, int, int], address: int, size: int
) -> PlainChunk:
    plain_hash, offset, stored_hash, stored_size, encoding, source, reserved = entry
    require(reserved == 0, "a reserved byte is not zero")
    require(encoding == LZ4 or stored_hash == 0, "stored hash of a chunk that is not lz4")
    if encoding == ZERO:
        require(
            offset == 0 and stored_size == 0 and source == 0, "zero chunk has a place in the file"
        )
    elif encoding == LZ4:
        require(1 <= stored_size < size, "size of lz4 chunk out of range")
    elif encoding == RAW:
        require(stored_size == size, "raw chunk has the wrong size")
    else:
        raise ImageError(f"encoding {encoding} cannot stand here")
    return PlainChunk(
        address=address,
        plain_size=size,
        plain_hash=plain_hash,
        offset=offset,
        stored_hash=stored_hash,
        stored_size=stored_size,
        encoding=encoding,
        source=source,
    )


def _parse_regions(raw: bytes) -> tuple[PlainRegion, ...]:
    regions = []
    lowest = 0
    for address, length, protection, kind, reserved in REGION.iter_unpack(raw):
        require(address % 4096 == 0 and length % 4096 == 0 and length > 0, "region malformed")
        require(lowest <= address and address + length <= _MAX_ADDRESS, "region out of place")
        require(protection <= 7 and kind <= DEVICE and not any(reserved), "region malformed")
        lowest = address + length
        regions.append(
            PlainRegion(address=address, length=length, protection=protection, kind=kind)
        )
    return tuple(regions)


def _parse_sources(raw: bytes) -> tuple[PlainSource, ...]:
    sources = []
    lowest = (0, 1, 0)
    for checkpoint_id, digest, file_size, pid, depth, kind, reserved in _SOURCE.iter_unpack(raw):
        require((depth, pid, kind) >= lowest, "sources do not ascend")
        require(1 <= pid < 1 << 31 and kind <= CPU_MEMORY and reserved == 0, "source malformed")
        lowest = (depth, pid, kind + 1)
        sources.append(
            PlainSource(
                checkpoint_id=checkpoint_id,
                digest=digest,
                file_size=file_size,
                pid=pid,
                depth=depth,
                kind=kind,
            )
        )
    return tuple(sources)


def _check_padding(padding: bytes) -> None:
    require(not any(padding), "padding is not zero")


def _is_power(number: int, lowest: int, highest: int) -> bool:
    return lowest <= number <= highest and number & (number - 1) == 0
