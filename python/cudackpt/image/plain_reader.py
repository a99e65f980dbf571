"""A second reader of images and manifests, in plain Python, written from docs/format.md alone.

It shares no code with the C++ reader: tests hold the two against each other. Slow; for files that
fit in memory.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import lz4.block  # type: ignore[import-untyped]
import xxhash

from cudackpt.errors import ImageError, UnsupportedError

HEADER_SIZE = 256
TRAILER_SIZE = 128
INDEX_ENTRY_SIZE = 40
ZERO, LZ4, RAW, REF = range(4)

_IMAGE_MAGIC = b"\x93CUCKPT\n"
_TRAILER_MAGIC = b"CUCKEND\n"
_MANIFEST_MAGIC = b"\x93CUCKMF\n"
_VERSION = 1
_MANIFEST_HEADER_SIZE = 96
_NO_ID = bytes(16)

_START = struct.Struct("<8sIIQQ")
_HEADER = struct.Struct("<16s16sIII164s")
_METADATA = struct.Struct("<Q16sIIII16s32s8s")
_GPU = struct.Struct("<16sQ256s")
_REGION = struct.Struct("<QQIB3s")
_INDEX_ENTRY = struct.Struct("<16sQQIB3s")
_TRAILER = struct.Struct("<QQ16sQQ16s16sQ16s8s")
_MANIFEST = struct.Struct("<16sIIII32s")
_TASK = struct.Struct("<IIB7s16s")

_MAX_CHUNKS = 1 << 25
_MAX_REGIONS = 1 << 20
_MAX_GPUS = 256
_MAX_TASKS = 65536
_MAX_ADDRESS = 1 << 57


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainRegion:
    """A run of memory in bytes. kind: 0 private, 1 shared anonymous."""

    address: int
    length: int
    protection: int
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainGpu:
    uuid: bytes
    memory_size: int
    name: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainChunk:
    """One chunk, its place in memory and in the file."""

    address: int
    plain_size: int
    plain_hash: bytes
    offset: int
    stored_hash: int
    stored_size: int
    encoding: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTask:
    pid: int
    state_before: int
    externalized: bool
    digest: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainManifest:
    checkpoint_id: bytes
    driver_api_version: int
    driver_version: bytes
    gpus: tuple[PlainGpu, ...]
    tasks: tuple[PlainTask, ...]


def parse_manifest(file: bytes) -> PlainManifest:
    """Take a manifest apart. Raises ImageError, UnsupportedError."""
    _require(len(file) >= _MANIFEST_HEADER_SIZE + 16, "too short for a manifest")
    _check_start(file, _MANIFEST_MAGIC, _MANIFEST_HEADER_SIZE, file[-16:], file[:-16])
    checkpoint_id, api_version, gpu_count, task_count, reserved, version = _MANIFEST.unpack_from(
        file, _START.size
    )
    _require(reserved == 0, "a reserved byte is not zero")
    _require(gpu_count <= _MAX_GPUS and task_count <= _MAX_TASKS, "too many GPUs or tasks")
    tasks_offset = _MANIFEST_HEADER_SIZE + _GPU.size * gpu_count
    _require(len(file) == tasks_offset + _TASK.size * task_count + 16, "wrong size")
    tasks = [_parse_task(file, tasks_offset + _TASK.size * i) for i in range(task_count)]
    pids = [task.pid for task in tasks]
    _require(pids == sorted(set(pids)), "pids do not ascend")
    return PlainManifest(
        checkpoint_id=checkpoint_id,
        driver_api_version=api_version,
        driver_version=_text(version),
        gpus=_parse_gpus(file, _MANIFEST_HEADER_SIZE, gpu_count),
        tasks=tuple(tasks),
    )


class PlainImage:
    """An image held in memory, checked when made but for the content of its chunks."""

    alignment: int
    chunk_size: int

    def __init__(self, file: bytes) -> None:
        """Raises ImageError, UnsupportedError."""
        self._file = file
        _require(len(file) >= HEADER_SIZE + TRAILER_SIZE, "too short for an image")
        self._parse_header()
        self._parse_trailer()
        self._parse_metadata()
        self.chunks = self._parse_index()

    def read_chunk(self, index: int) -> bytes:
        """The plain bytes of a chunk. Raises ImageError if a hash does not match."""
        chunk = self.chunks[index]
        stored = self._file[chunk.offset : chunk.offset + chunk.stored_size]
        if chunk.encoding == ZERO:
            plain = bytes(chunk.plain_size)
        elif chunk.encoding == RAW:
            plain = stored
        else:
            _require(xxhash.xxh3_64_intdigest(stored) == chunk.stored_hash, "stored bytes damaged")
            try:
                plain = lz4.block.decompress(stored, uncompressed_size=chunk.plain_size)
            except lz4.block.LZ4BlockError as exc:
                raise ImageError(f"chunk {index} does not decode: {exc}") from exc
        _require(len(plain) == chunk.plain_size, "chunk decodes to another size")
        _require(xxhash.xxh3_128_digest(plain) == chunk.plain_hash, "content damaged")
        return plain

    def verify(self) -> None:
        """Check every chunk and all padding. Raises ImageError."""
        end = HEADER_SIZE
        for index, chunk in enumerate(self.chunks):
            self.read_chunk(index)
            if chunk.encoding != ZERO:
                self._check_padding(end, chunk.offset)
                end = chunk.offset + chunk.stored_size
        self._check_padding(end, self._metadata_offset)

    def _check_padding(self, begin: int, end: int) -> None:
        _require(not any(self._file[begin:end]), "padding is not zero")

    def _parse_header(self) -> None:
        header = self._file[:HEADER_SIZE]
        _check_start(header, _IMAGE_MAGIC, HEADER_SIZE, header[240:], header[:240])
        (
            self.checkpoint_id,
            self.parent_id,
            self.pid,
            self.chunk_size,
            self.alignment,
            reserved,
        ) = _HEADER.unpack_from(header, _START.size)
        _require(not any(reserved), "a reserved byte is not zero")
        _require(1 <= self.pid < 1 << 31, "pid out of range")
        _require(_is_power(self.chunk_size, 4096, 4 << 20), "chunk size out of range")
        _require(_is_power(self.alignment, 1, 4096), "alignment out of range")

    def _parse_trailer(self) -> None:
        trailer = self._file[-TRAILER_SIZE:]
        self.digest = trailer[112:]
        _require(xxhash.xxh3_128_digest(trailer[:112]) == self.digest, "trailer damaged")
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
        ) = _TRAILER.unpack_from(trailer)
        _require(magic == _TRAILER_MAGIC and not any(reserved), "trailer malformed")
        _require(header_hash == self._file[240:256], "header and trailer do not belong together")
        _require(file_size == len(self._file), "file has another size than it should have")
        _require(self._chunk_count <= _MAX_CHUNKS, "too many chunks")
        index_end = self._index_offset + INDEX_ENTRY_SIZE * self._chunk_count
        _require(index_end == file_size - TRAILER_SIZE, "index is not where it should be")
        metadata_end = self._metadata_offset + self._metadata_size
        _require(metadata_end == self._index_offset, "metadata is not where it should be")

    def _parse_metadata(self) -> None:
        raw = self._file[self._metadata_offset : self._index_offset]
        _require(xxhash.xxh3_128_digest(raw) == self._metadata_hash, "metadata damaged")
        _require(len(raw) >= _METADATA.size, "metadata too short")
        (
            self.start_time,
            self.boot_id,
            self.state_before,
            self.driver_api_version,
            region_count,
            gpu_count,
            comm,
            driver_version,
            reserved,
        ) = _METADATA.unpack_from(raw)
        _require(not any(reserved), "a reserved byte is not zero")
        _require(self.state_before <= 3, "unknown state")
        _require(region_count <= _MAX_REGIONS and gpu_count <= _MAX_GPUS, "too many regions, GPUs")
        regions_offset = _METADATA.size + _GPU.size * gpu_count
        _require(len(raw) == regions_offset + _REGION.size * region_count, "metadata size")
        self.comm = _text(comm)
        self.driver_version = _text(driver_version)
        self.gpus = _parse_gpus(raw, _METADATA.size, gpu_count)
        self.regions = _parse_regions(raw[regions_offset:])

    def _parse_index(self) -> tuple[PlainChunk, ...]:
        raw = self._file[self._index_offset : -TRAILER_SIZE]
        _require(xxhash.xxh3_128_digest(raw) == self._index_hash, "index damaged")
        count = sum(-(-region.length // self.chunk_size) for region in self.regions)
        _require(count == self._chunk_count, "number of chunks does not follow from the regions")
        places = [
            (address, min(self.chunk_size, region.address + region.length - address))
            for region in self.regions
            for address in range(region.address, region.address + region.length, self.chunk_size)
        ]
        chunks = []
        expected = self._align(HEADER_SIZE)
        for entry, (address, size) in zip(_INDEX_ENTRY.iter_unpack(raw), places, strict=True):
            chunk = _parse_entry(entry, address, size)
            if chunk.encoding != ZERO:
                _require(chunk.offset == expected, "chunk is not where it should be")
                expected = self._align(chunk.offset + chunk.stored_size)
            chunks.append(chunk)
        _require(expected == self._metadata_offset, "chunks do not fill the data area")
        return tuple(chunks)

    def _align(self, offset: int) -> int:
        return -(-offset // self.alignment) * self.alignment


def _parse_entry(
    entry: tuple[bytes, int, int, int, int, bytes], address: int, size: int
) -> PlainChunk:
    plain_hash, offset, stored_hash, stored_size, encoding, reserved = entry
    _require(not any(reserved), "a reserved byte is not zero")
    _require(encoding == LZ4 or stored_hash == 0, "stored hash of a chunk that is not lz4")
    if encoding == ZERO:
        _require(offset == 0 and stored_size == 0, "zero chunk has a place in the file")
    elif encoding == LZ4:
        _require(1 <= stored_size < size, "size of lz4 chunk out of range")
    elif encoding == RAW:
        _require(stored_size == size, "raw chunk has the wrong size")
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
    )


def _parse_regions(raw: bytes) -> tuple[PlainRegion, ...]:
    regions = []
    lowest = 0
    for address, length, protection, kind, reserved in _REGION.iter_unpack(raw):
        _require(address % 4096 == 0 and length % 4096 == 0 and length > 0, "region malformed")
        _require(lowest <= address and address + length <= _MAX_ADDRESS, "region out of place")
        _require(protection <= 7 and kind <= 1 and not any(reserved), "region malformed")
        lowest = address + length
        regions.append(
            PlainRegion(address=address, length=length, protection=protection, kind=kind)
        )
    return tuple(regions)


def _parse_gpus(raw: bytes, offset: int, count: int) -> tuple[PlainGpu, ...]:
    gpus = []
    for i in range(count):
        uuid, memory_size, name = _GPU.unpack_from(raw, offset + _GPU.size * i)
        gpus.append(PlainGpu(uuid=uuid, memory_size=memory_size, name=_text(name)))
    return tuple(gpus)


def _parse_task(raw: bytes, offset: int) -> PlainTask:
    pid, state, externalized, reserved, digest = _TASK.unpack_from(raw, offset)
    _require(1 <= pid < 1 << 31 and state <= 3, "task malformed")
    _require(externalized <= 1 and not any(reserved), "task malformed")
    _require(externalized == 1 or digest == _NO_ID, "digest of an image that does not exist")
    return PlainTask(pid=pid, state_before=state, externalized=externalized == 1, digest=digest)


def _check_start(file: bytes, magic: bytes, size: int, found_hash: bytes, hashed: bytes) -> None:
    """Check what images and manifests begin with. found_hash: as stored; hashed: what it covers."""
    found_magic, version, header_size, required, _optional = _START.unpack_from(file)
    _require(found_magic == magic, "wrong magic")
    _require(xxhash.xxh3_128_digest(hashed) == found_hash, "header damaged")
    if version != _VERSION:
        raise UnsupportedError(f"format version {version}, this reader knows {_VERSION}")
    _require(header_size == size, "header has the wrong size")
    if required != 0:
        raise UnsupportedError(f"required features {required:#x} are not known")


def _text(field: bytes) -> bytes:
    text = field.rstrip(b"\0")
    _require(len(text) < len(field) and b"\0" not in text, "text is not padded with zero bytes")
    return text


def _is_power(number: int, lowest: int, highest: int) -> bool:
    return lowest <= number <= highest and number & (number - 1) == 0


def _require(condition: bool, otherwise: str) -> None:
    if not condition:
        raise ImageError(otherwise)
