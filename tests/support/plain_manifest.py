# SPDX-License-Identifier: Apache-2.0
"""A second reader of manifests, in plain Python, written from docs/format.md alone.

Also what images and manifests are made of alike.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from gpustasis.errors import ImageError, UnsupportedError

FEATURE_PARENT = 1 << 0
_PACK = struct.Struct("<16s16s")
FEATURE_REQUIREMENTS = 1 << 2  # of manifests
FEATURE_CPU_MEMORY = 1 << 3
FEATURE_ALIKE = 1 << 4  # of images
FEATURE_FILES = 1 << 5
FEATURE_DEVICES = 1 << 6  # of images
GPU_MEMORY, CPU_MEMORY, FILES = range(3)
NO_ID = bytes(16)
MAX_GPUS = 256
MAX_DEPTH = 65535  # of a source, and length of a chain

_VERSION = 1
START = struct.Struct("<8sIIQQ")
GPU = struct.Struct("<16sQ256s")

_MAGIC = b"\x93GPUSMF\n"
_HEADER_SIZE = 96
_HASH_SIZE = 16
_MAX_TASKS = 65536
_MAX_TASK_GPUS = 1 << 20
_UNKNOWN_SOURCE, _DEVICE_FILES, _NVML = range(3)
_UNKNOWN_SIZE = (1 << 64) - 1
_FIELDS = struct.Struct("<16sIIII32s")
_TASK = struct.Struct("<IIBBB5s16s")
_TASK_GPU = struct.Struct("<IIQ")
_PARENT = struct.Struct("<16sI12s")
_REQUIREMENTS = struct.Struct("<III4s")
_FILE = struct.Struct("<QIBBBB32s")
_MAX_FILES = 16384
_MAX_PATHS = 2 << 20
_MAX_PATH = 4095
_MAX_HASHED_FILE = 64 << 20
_MAX_HASHED_FILES = 256 << 20
_SIZE, _BUILD_ID, _CONTENT = range(3)
_INNER = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainGpu:
    uuid: bytes
    memory_size: int
    name: bytes


def parse_gpus(raw: bytes, offset: int, count: int) -> tuple[PlainGpu, ...]:
    gpus = []
    for i in range(count):
        uuid, memory_size, name = GPU.unpack_from(raw, offset + GPU.size * i)
        gpus.append(PlainGpu(uuid=uuid, memory_size=memory_size, name=text(name)))
    return tuple(gpus)


def check_start(
    file: bytes,
    magic: bytes,
    size: int,
    found_hash: bytes,
    hashed: bytes,
    known: int = FEATURE_PARENT,
) -> int:
    """Check what images and manifests begin with; their required features.

    found_hash: as stored; hashed: what it covers; known: features of this kind of file. Raises
    ImageError, UnsupportedError.
    """
    found_magic, version, header_size, required, _optional = START.unpack_from(file)
    require(found_magic == magic, "wrong magic")
    require(xxhash.xxh3_128_digest(hashed) == found_hash, "header damaged")
    if version != _VERSION:
        raise UnsupportedError(f"format version {version}, this reader knows {_VERSION}")
    require(header_size == size, "header has the wrong size")
    if required & ~known:
        raise UnsupportedError(f"required features {required:#x} are not all known")
    return int(required)


def text(field: bytes) -> bytes:
    """A textN without its padding. Raises ImageError."""
    stripped = field.rstrip(b"\0")
    padded = len(stripped) < len(field) and b"\0" not in stripped
    require(padded, "text is not padded with zero bytes")
    return stripped


def require(condition: bool, otherwise: str) -> None:
    """Raises ImageError(otherwise) unless condition."""
    if not condition:
        raise ImageError(otherwise)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTaskGpu:
    gpu: int
    memory_size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainTask:
    pid: int
    state_before: int
    externalized: bool
    digest: bytes
    gpu_source: int
    gpus: tuple[PlainTaskGpu, ...]
    kind: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainFile:
    path: bytes
    place: int
    size: int
    identity: int
    id: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainManifest:
    """parent_id all zero, chain_length 0: no parent. files None: they were not recorded. pack None:
    there is none."""

    checkpoint_id: bytes
    driver_api_version: int
    driver_version: bytes
    gpus: tuple[PlainGpu, ...]
    tasks: tuple[PlainTask, ...]
    parent_id: bytes
    chain_length: int
    files: tuple[PlainFile, ...] | None
    unrecorded: int
    pack: bytes | None


def parse_manifest(file: bytes) -> PlainManifest:
    """Take a manifest apart. Raises ImageError, UnsupportedError."""
    require(len(file) >= _HEADER_SIZE + _HASH_SIZE, "too short for a manifest")
    required = check_start(
        file,
        _MAGIC,
        _HEADER_SIZE,
        file[-_HASH_SIZE:],
        file[:-_HASH_SIZE],
        FEATURE_PARENT | FEATURE_REQUIREMENTS | FEATURE_CPU_MEMORY | FEATURE_FILES,
    )
    has_parent = bool(required & FEATURE_PARENT)
    checkpoint_id, api_version, gpu_count, task_count, task_gpu_count, version = (
        _FIELDS.unpack_from(file, START.size)
    )
    require(gpu_count <= MAX_GPUS and task_count <= _MAX_TASKS, "too many GPUs or tasks")
    require(task_gpu_count <= _MAX_TASK_GPUS, "too many GPUs of tasks")
    tasks_offset = _HEADER_SIZE + GPU.size * gpu_count
    task_gpus_offset = tasks_offset + _TASK.size * task_count
    parent_offset = task_gpus_offset + _TASK_GPU.size * task_gpu_count
    pack_offset = parent_offset + (_PARENT.size if has_parent else 0)
    has_pack = bool(required & FEATURE_FILES)
    end = pack_offset + (_PACK.size if has_pack else 0)
    require(len(file) >= end + _HASH_SIZE, "wrong size")
    pack = None
    if has_pack:
        pack, reserved = _PACK.unpack_from(file, pack_offset)
        require(not any(reserved), "a reserved byte is not zero")
    rest = file[end:-_HASH_SIZE]
    files, unrecorded = None, 0
    if required & FEATURE_REQUIREMENTS:
        files, unrecorded = _parse_requirements(rest)
    else:
        require(rest == b"", "wrong size")
    by_pid = _parse_task_gpus(file[task_gpus_offset:parent_offset], gpu_count)
    tasks = [_parse_task(file, tasks_offset + _TASK.size * i, by_pid) for i in range(task_count)]
    require(not by_pid, "a GPU of a task that is not there")
    places = [(task.pid, task.kind) for task in tasks]
    require(places == sorted(set(places)), "pids do not ascend")
    has_cpu_memory = any(task.kind == CPU_MEMORY for task in tasks)
    require(has_cpu_memory == bool(required & FEATURE_CPU_MEMORY), "kinds and features")
    parent_id, chain_length = _parse_parent(file, parent_offset) if has_parent else (NO_ID, 0)
    return PlainManifest(
        checkpoint_id=checkpoint_id,
        driver_api_version=api_version,
        driver_version=text(version),
        gpus=parse_gpus(file, _HEADER_SIZE, gpu_count),
        tasks=tuple(tasks),
        parent_id=parent_id,
        chain_length=chain_length,
        files=files,
        unrecorded=unrecorded,
        pack=pack,
    )


def _parse_requirements(raw: bytes) -> tuple[tuple[PlainFile, ...], int]:
    require(len(raw) >= _REQUIREMENTS.size, "wrong size")
    count, paths_size, unrecorded, reserved = _REQUIREMENTS.unpack_from(raw)
    require(not any(reserved), "a reserved byte is not zero")
    require(count <= _MAX_FILES and paths_size <= _MAX_PATHS, "too many mapped files")
    entries_end = _REQUIREMENTS.size + _FILE.size * count
    require(len(raw) == entries_end + paths_size, "wrong size")
    paths = raw[entries_end:]
    files = []
    for entry in _FILE.iter_unpack(raw[_REQUIREMENTS.size : entries_end]):
        length = entry[1]
        require(length <= len(paths), "a path lies beyond the end")
        files.append(_parse_file(entry, paths[:length]))
        paths = paths[length:]
    require(paths == b"", "more paths than files")
    order = [(file.place, file.path) for file in files]
    require(order == sorted(set(order)), "mapped files do not ascend")
    hashed = sum(file.size for file in files if file.identity == _CONTENT)
    require(hashed <= _MAX_HASHED_FILES, "too much to hash")
    return tuple(files), unrecorded


def _parse_file(entry: tuple[int, int, int, int, int, int, bytes], path: bytes) -> PlainFile:
    size, _length, identity, place, id_size, reserved, field = entry
    require(reserved == 0 and id_size <= len(field), "mapped file malformed")
    require(not any(field[id_size:]), "identity is not padded with zero bytes")
    require(2 <= len(path) <= _MAX_PATH and path[:1] == b"/", "path malformed")
    require(b"\0" not in path and place <= _INNER, "mapped file malformed")
    sizes = {_SIZE: range(1), _BUILD_ID: range(1, 33), _CONTENT: range(16, 17)}
    require(id_size in sizes.get(identity, ()), "identity malformed")
    require(identity != _CONTENT or size <= _MAX_HASHED_FILE, "too large to hash")
    return PlainFile(path=path, place=place, size=size, identity=identity, id=field[:id_size])


def _parse_task_gpus(raw: bytes, gpu_count: int) -> dict[int, tuple[PlainTaskGpu, ...]]:
    entries = list(_TASK_GPU.iter_unpack(raw))
    places = [(pid, gpu) for pid, gpu, _ in entries]
    require(places == sorted(set(places)), "GPUs of tasks do not ascend")
    require(all(gpu < gpu_count for _, gpu in places), "a GPU that is not listed")
    found: dict[int, tuple[PlainTaskGpu, ...]] = {}
    for pid, gpu, size in entries:
        found[pid] = (*found.get(pid, ()), PlainTaskGpu(gpu=gpu, memory_size=size))
    return found


def _parse_task(raw: bytes, offset: int, by_pid: dict[int, tuple[PlainTaskGpu, ...]]) -> PlainTask:
    pid, state, externalized, source, kind, reserved, digest = _TASK.unpack_from(raw, offset)
    require(kind <= CPU_MEMORY, "unknown kind of memory")
    gpus = () if kind == CPU_MEMORY else by_pid.pop(pid, ())
    require(kind == GPU_MEMORY or (externalized, state, source) == (1, 0, 0), "no GPU memory")
    require(source <= _NVML, "task malformed")
    require((source == _UNKNOWN_SOURCE) == (not gpus), "GPUs and their source")
    known = any(gpu.memory_size != _UNKNOWN_SIZE for gpu in gpus)
    require(source != _DEVICE_FILES or not known, "device files do not tell sizes")
    require(1 <= pid < 1 << 31 and state <= 3, "task malformed")
    require(externalized <= 1 and not any(reserved), "task malformed")
    require(externalized == 1 or digest == NO_ID, "digest of an image that does not exist")
    return PlainTask(
        pid=pid,
        state_before=state,
        externalized=externalized == 1,
        digest=digest,
        gpu_source=source,
        gpus=gpus,
        kind=kind,
    )


def _parse_parent(raw: bytes, offset: int) -> tuple[bytes, int]:
    parent_id, chain_length, reserved = _PARENT.unpack_from(raw, offset)
    require(parent_id != NO_ID, "a parent without an id")
    require(1 <= chain_length <= MAX_DEPTH, "chain length out of range")
    require(not any(reserved), "a reserved byte is not zero")
    return parent_id, chain_length
