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
_TASK = struct.Struct("<IIBB6s16s")
_TASK_GPU = struct.Struct("<IIQ")
_PARENT = struct.Struct("<16sI12s")


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


def check_start(file: bytes, magic: bytes, size: int, found_hash: bytes, hashed: bytes) -> int:
    """Check what images and manifests begin with; their required features.

    found_hash: as stored; hashed: what it covers. Raises ImageError, UnsupportedError.
    """
    found_magic, version, header_size, required, _optional = START.unpack_from(file)
    require(found_magic == magic, "wrong magic")
    require(xxhash.xxh3_128_digest(hashed) == found_hash, "header damaged")
    if version != _VERSION:
        raise UnsupportedError(f"format version {version}, this reader knows {_VERSION}")
    require(header_size == size, "header has the wrong size")
    if required & ~FEATURE_PARENT:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainManifest:
    """parent_id all zero, chain_length 0: no parent."""

    checkpoint_id: bytes
    driver_api_version: int
    driver_version: bytes
    gpus: tuple[PlainGpu, ...]
    tasks: tuple[PlainTask, ...]
    parent_id: bytes
    chain_length: int


def parse_manifest(file: bytes) -> PlainManifest:
    """Take a manifest apart. Raises ImageError, UnsupportedError."""
    require(len(file) >= _HEADER_SIZE + _HASH_SIZE, "too short for a manifest")
    required = check_start(file, _MAGIC, _HEADER_SIZE, file[-_HASH_SIZE:], file[:-_HASH_SIZE])
    has_parent = bool(required & FEATURE_PARENT)
    checkpoint_id, api_version, gpu_count, task_count, task_gpu_count, version = (
        _FIELDS.unpack_from(file, START.size)
    )
    require(gpu_count <= MAX_GPUS and task_count <= _MAX_TASKS, "too many GPUs or tasks")
    require(task_gpu_count <= _MAX_TASK_GPUS, "too many GPUs of tasks")
    tasks_offset = _HEADER_SIZE + GPU.size * gpu_count
    task_gpus_offset = tasks_offset + _TASK.size * task_count
    parent_offset = task_gpus_offset + _TASK_GPU.size * task_gpu_count
    size = parent_offset + (_PARENT.size if has_parent else 0) + _HASH_SIZE
    require(len(file) == size, "wrong size")
    by_pid = _parse_task_gpus(file[task_gpus_offset:parent_offset], gpu_count)
    tasks = [_parse_task(file, tasks_offset + _TASK.size * i, by_pid) for i in range(task_count)]
    require(not by_pid, "a GPU of a task that is not there")
    pids = [task.pid for task in tasks]
    require(pids == sorted(set(pids)), "pids do not ascend")
    parent_id, chain_length = _parse_parent(file, parent_offset) if has_parent else (NO_ID, 0)
    return PlainManifest(
        checkpoint_id=checkpoint_id,
        driver_api_version=api_version,
        driver_version=text(version),
        gpus=parse_gpus(file, _HEADER_SIZE, gpu_count),
        tasks=tuple(tasks),
        parent_id=parent_id,
        chain_length=chain_length,
    )


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
    pid, state, externalized, source, reserved, digest = _TASK.unpack_from(raw, offset)
    gpus = by_pid.pop(pid, ())
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
    )


def _parse_parent(raw: bytes, offset: int) -> tuple[bytes, int]:
    parent_id, chain_length, reserved = _PARENT.unpack_from(raw, offset)
    require(parent_id != NO_ID, "a parent without an id")
    require(1 <= chain_length <= MAX_DEPTH, "chain length out of range")
    require(not any(reserved), "a reserved byte is not zero")
    return parent_id, chain_length
