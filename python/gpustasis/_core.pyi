# SPDX-License-Identifier: Apache-2.0
"""Checkpoint images and dirty pages in C++. Source: src/bindings; the docstrings are there."""

from collections.abc import Callable, Sequence
from enum import Enum
from os import PathLike
from types import TracebackType
from typing import Final, Self, TypeAlias

from typing_extensions import Buffer

from gpustasis._core_arena import *  # noqa: F403
from gpustasis._core_dirty import *  # noqa: F403
from gpustasis._core_requirements import *  # noqa: F403
from gpustasis._core_requirements import Requirements
from gpustasis._core_seal import *  # noqa: F403
from gpustasis._core_seal import DataKey
from gpustasis._core_signature import *  # noqa: F403

_Path: TypeAlias = str | PathLike[str]

MIN_CHUNK_SIZE: int
MAX_CHUNK_SIZE: int
DEFAULT_CHUNK_SIZE: int
MANIFEST_NAME: str
PARENT_LINK: str
IMAGE_HEADER_SIZE: int
IMAGE_TRAILER_SIZE: int

class CorruptDataError(ValueError): ...
class UnsupportedDataError(NotImplementedError): ...

class Encoding(Enum):
    ZERO = 0
    LZ4 = 1
    RAW = 2

class RegionKind(Enum):
    PRIVATE_ANONYMOUS = 0
    SHARED_ANONYMOUS = 1
    DEVICE = 2

class MemoryKind(Enum):
    GPU = 0
    CPU = 1
    FILES = 2

class ProcessState(Enum):
    RUNNING = 0
    LOCKED = 1
    CHECKPOINTED = 2
    FAILED = 3

def encode_chunk(
    plain: Buffer, compress: bool = True, lz4_acceleration: int = 1
) -> tuple[Encoding, bytes]: ...
def decode_chunk(encoding: Encoding, stored: Buffer, plain: Buffer) -> None: ...
def hash128(data: Buffer) -> bytes: ...
def hash64(data: Buffer) -> int: ...

class Region:
    def __init__(
        self, address: int, length: int, protection: int = 3, kind: RegionKind = ...
    ) -> None: ...
    address: Final[int]
    length: Final[int]
    protection: Final[int]
    kind: Final[RegionKind]

class GpuInfo:
    def __init__(self, uuid: bytes, name: str, memory_size: int) -> None: ...
    @property
    def uuid(self) -> bytes: ...
    @property
    def name(self) -> str: ...
    @property
    def memory_size(self) -> int: ...

class Source:
    kind: Final[MemoryKind]
    image_name: Final[str]
    checkpoint_id: Final[bytes]
    digest: Final[bytes]
    file_size: Final[int]
    pid: Final[int]
    depth: Final[int]

class ImageInfo:
    kind: Final[MemoryKind]
    image_name: Final[str]
    def __init__(
        self,
        *,
        pid: int,
        checkpoint_id: bytes,
        start_time: int = 0,
        boot_id: bytes = ...,
        comm: str = "",
        state_before: ProcessState = ...,
        driver_api_version: int = 0,
        driver_version: str = "",
        gpus: Sequence[GpuInfo] = ...,
        chunk_size: int = 0,
        regions: Sequence[Region] = ...,
        kind: MemoryKind = ...,
    ) -> None: ...
    checkpoint_id: Final[bytes]
    parent_id: Final[bytes]
    pid: Final[int]
    start_time: Final[int]
    boot_id: Final[bytes]
    comm: Final[str]
    state_before: Final[ProcessState]
    driver_api_version: Final[int]
    driver_version: Final[str]
    gpus: Final[list[GpuInfo]]
    chunk_size: Final[int]
    regions: Final[list[Region]]
    sources: Final[list[Source]]
    of_devices: Final[bool]

class EncodingCount:
    @property
    def chunks(self) -> int: ...
    @property
    def plain(self) -> int: ...
    @property
    def stored(self) -> int: ...

class EncodingTotals:
    @property
    def zero(self) -> EncodingCount: ...
    @property
    def lz4(self) -> EncodingCount: ...
    @property
    def raw(self) -> EncodingCount: ...
    @property
    def ref(self) -> EncodingCount: ...
    @property
    def alike(self) -> EncodingCount: ...

class WriteResult:
    @property
    def totals(self) -> EncodingTotals: ...
    @property
    def file_size(self) -> int: ...
    @property
    def damaged_in_parent(self) -> int: ...
    @property
    def first_damage(self) -> str: ...
    @property
    def digest(self) -> bytes: ...

def write_image(
    path: _Path,
    info: ImageInfo,
    memory: Sequence[tuple[int, Buffer]],
    *,
    threads: int = 0,
    compress: bool = True,
    lz4_acceleration: int = 1,
    alignment: int = 4096,
    parent: ParentIndex | None = None,
    check_parent: bool = False,
) -> WriteResult: ...
def flatten_image(
    image: ImageReader,
    path: _Path,
    threads: int = 0,
    progress: Callable[[int], object] | None = None,
) -> WriteResult: ...
def drain_images(
    arena: _Path,
    images: _Path,
    parent: _Path | None,
    *,
    threads: int = 0,
    compress: bool = True,
    rate: int = 0,
    progress: Callable[[int], object] | None = None,
) -> Manifest: ...
def link_parent(dir: _Path, parent: _Path) -> None: ...

class ParentIndex:
    def __init__(self, chunk_size: int = 0) -> None: ...
    def add(self, dir: _Path, checkpoint_id: bytes, task: ManifestTask) -> None: ...
    @staticmethod
    def read(dir: _Path) -> ParentIndex: ...
    @property
    def manifest(self) -> Manifest: ...
    @property
    def chunk_size(self) -> int: ...
    def __len__(self) -> int: ...

class ChunkInfo:
    @property
    def address(self) -> int: ...
    @property
    def plain_size(self) -> int: ...
    @property
    def stored_size(self) -> int: ...
    @property
    def offset(self) -> int: ...
    @property
    def encoding(self) -> Encoding: ...
    @property
    def source(self) -> int: ...
    @property
    def hash(self) -> bytes: ...

class ImageReader:
    @staticmethod
    def open(path: _Path) -> ImageReader: ...
    @staticmethod
    def open_part(fd: int, offset: int, length: int, name: str) -> ImageReader: ...
    @staticmethod
    def find_sealed(directory: _Path, name: str, key: DataKey) -> ImageReader: ...
    @staticmethod
    def from_ends(header: Buffer, tail: Buffer, size: int, name: str) -> ImageReader: ...
    @staticmethod
    def tail_size(trailer: Buffer, size: int) -> int: ...
    def check_stored(self, index: int, stored: Buffer) -> None: ...
    @property
    def info(self) -> ImageInfo: ...
    @property
    def totals(self) -> EncodingTotals: ...
    @property
    def file_size(self) -> int: ...
    @property
    def digest(self) -> bytes: ...
    def attach_sources(self) -> None: ...
    def __len__(self) -> int: ...
    def chunk(self, index: int) -> ChunkInfo: ...
    def read_chunk(self, index: int) -> bytes: ...
    def read_chunk_into(self, index: int, plain: Buffer) -> None: ...
    def verify(self, threads: int = 0, progress: Callable[[int], object] | None = None) -> None: ...
    def find_damage(
        self, begin: int, end: int, sources: Sequence[int], threads: int = 0
    ) -> list[tuple[int, str]]: ...
    def find_damaged_references(
        self, source: int, owner: ImageReader, damaged: Sequence[int]
    ) -> list[tuple[int, str]]: ...
    def restore_to_process(
        self,
        pid: int,
        threads: int = 0,
        fresh: bool = False,
        progress: Callable[[int], object] | None = None,
    ) -> None: ...

class FlatImageWriter:
    def __init__(self, image: ImageReader, path: _Path) -> None: ...
    def put(self, index: int, stored: Buffer) -> None: ...
    def finish(self) -> WriteResult: ...
    def __enter__(self) -> Self: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def image_name(pid: int, kind: MemoryKind = ...) -> str: ...

class GpuSource(Enum):
    UNKNOWN = 0
    DEVICE_FILES = 1
    NVML = 2

class TaskGpu:
    UNKNOWN_SIZE: int
    gpu: Final[int]
    memory_size: Final[int]
    def __init__(self, gpu: int, memory_size: int = ...) -> None: ...

class ManifestTask:
    def __init__(
        self,
        *,
        pid: int,
        externalized: bool = False,
        digest: bytes = ...,
        state_before: ProcessState = ...,
        gpu_source: GpuSource = ...,
        gpus: Sequence[TaskGpu] = ...,
        kind: MemoryKind = ...,
    ) -> None: ...
    kind: Final[MemoryKind]
    @property
    def image_name(self) -> str: ...
    pid: Final[int]
    externalized: Final[bool]
    digest: Final[bytes]
    state_before: Final[ProcessState]
    gpu_source: Final[GpuSource]
    gpus: Final[list[TaskGpu]]

class Manifest:
    def __init__(
        self,
        *,
        checkpoint_id: bytes,
        driver_api_version: int = 0,
        driver_version: str = "",
        gpus: Sequence[GpuInfo] = ...,
        tasks: Sequence[ManifestTask] = ...,
        parent_id: bytes = ...,
        chain_length: int = 0,
        requirements: Requirements | None = None,
        pack: bytes | None = None,
    ) -> None: ...
    checkpoint_id: Final[bytes]
    driver_api_version: Final[int]
    driver_version: Final[str]
    gpus: Final[list[GpuInfo]]
    tasks: Final[list[ManifestTask]]
    parent_id: Final[bytes]
    chain_length: Final[int]
    requirements: Final[Requirements | None]
    pack: Final[bytes | None]

def read_manifest(dir: _Path) -> Manifest: ...
def parse_manifest(data: Buffer, name: str) -> Manifest: ...
def stored_memory_digest(entries: Sequence[tuple[ManifestTask, Sequence[Region]]]) -> bytes: ...
def write_manifest(
    dir: _Path, manifest: Manifest, *, ns: tuple[int, int] | None = None
) -> None: ...

PACK_NAME: Final[str]

class PackedFile:
    name: Final[str]
    mode: Final[int]
    size: Final[int]
    mtime_ns: Final[int]

class PackReader:
    @staticmethod
    def open(dir: _Path) -> PackReader: ...
    checkpoint_id: Final[bytes]
    digest: Final[bytes]
    size: Final[int]
    files: Final[list[PackedFile]]
    def read(self, name: str) -> bytes: ...
    def extract(self, dir: _Path, threads: int = 0, without: str = "") -> None: ...
    def verify(self, threads: int = 0) -> None: ...

def write_pack(
    source: _Path, names: Sequence[str], target: _Path, *, checkpoint_id: bytes, threads: int = 0
) -> bytes: ...

class DropRecord:
    pid: Final[int]
    was_locked: Final[bool]
    handed_over: Final[bool]
    filled: Final[bool]
    directory: Final[str]
    device: Final[int]
    inode: Final[int]
    image: Final[str]
    checkpoint_id: Final[bytes]
    digest: Final[bytes]

class DumpLock:
    why_not: Final[str | None]
    def __init__(self, pid: int, who: str) -> None: ...
    def close(self) -> None: ...

def find_drop_record(pid: int) -> DropRecord | None: ...
def remove_drop_record(pid: int) -> None: ...
def find_filling_record(pid: int) -> DropRecord | None: ...
def find_checkpoint_record(pid: int) -> DropRecord | None: ...
def remove_checkpoint_record(pid: int) -> None: ...
def give_signals_back(pid: int, restore_thread: int) -> bool: ...
def is_drop_over(pid: int, restore_thread: int) -> bool: ...
def is_userfaultfd_setting_left() -> bool: ...
def list_drop_records() -> list[DropRecord]: ...
def restore_handed_over(
    directory: _Path,
    pid: int,
    image: str,
    checkpoint_id: bytes,
    digest: bytes,
    library: str,
    threads: int = 0,
    progress: Callable[[int], object] | None = None,
    key: DataKey | None = None,
) -> int: ...
def list_checkpoint_records() -> list[DropRecord]: ...
def refill_dropped(
    directory: _Path,
    pid: int,
    image: str,
    checkpoint_id: bytes,
    digest: bytes,
    threads: int = 0,
    progress: Callable[[int], object] | None = None,
    key: DataKey | None = None,
) -> int: ...
