# SPDX-License-Identifier: Apache-2.0
"""What a restore of a checkpoint needs of the machine: driver stack, GPUs with so much memory, and
the files that its processes had mapped."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from gpustasis._core import Manifest, MemoryKind, RequiredFile, TaskGpu, identity_text
from gpustasis.image.checkpoint import CheckpointFiles, gpu_uuid
from gpustasis.image.inspection import Inspection

_DRIVER_LIBRARIES = ("libcuda.so", "libcuda-", "libnvidia-", "libnvcuvid.so", "libcudadebugger.so")


@dataclass(frozen=True, slots=True, kw_only=True)
class MappedFile:
    """A file that a process had mapped.

    place: whose path it is: "host" (of the mount namespace that criu was in), "container" (of that
    of the root process) or "inner" (of another). identity: "build_id" (of an ELF file), "content"
    (id is the XXH3-128 of all of it) or "size" (no process had it mapped executable, or it is too
    large). id: in hex.
    """

    path: str
    place: str
    bytes: int
    identity: str
    id: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NeededGpu:
    """A GPU that the processes can see. memory_bytes: that they had in use there, the least that
    has to be free; None: not known of one of them."""

    uuid: str
    name: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RequirementsView:
    """What a restore needs.

    driver_libraries: those of `files` that belong to the driver. unplaced_bytes: of GPU memory of
    which it is not known on which GPU it was. files: None: they were not recorded. unrecorded:
    mapped files that are not among them.
    """

    driver_api_version: int
    driver_version: str
    driver_libraries: tuple[MappedFile, ...]
    gpus: tuple[NeededGpu, ...]
    unplaced_bytes: int
    files: tuple[MappedFile, ...] | None
    unrecorded: int

    def to_json(self) -> dict[str, Any]:
        """For json.dumps; the keys are the fields above."""
        return asdict(self)


def find_requirements(files: CheckpointFiles, found: Inspection) -> RequirementsView | None:
    """What `files`, which were inspected as `found`, need; None: gpustasis saved nothing in it.
    Raises ImageError, UnsupportedError."""
    manifest = files.manifest()
    if manifest is None:
        return None
    recorded = manifest.requirements
    mapped = None if recorded is None else tuple(_mapped_file(file) for file in recorded.files)
    return RequirementsView(
        driver_api_version=manifest.driver_api_version,
        driver_version=manifest.driver_version,
        driver_libraries=tuple(file for file in mapped or () if _is_drivers(file.path)),
        gpus=_needed_gpus(manifest, found),
        unplaced_bytes=_unplaced_bytes(manifest, found),
        files=mapped,
        unrecorded=0 if recorded is None else recorded.unrecorded,
    )


def _mapped_file(file: RequiredFile) -> MappedFile:
    return MappedFile(
        path=file.path,
        place=file.place.name.lower(),
        bytes=file.size,
        identity=file.identity.name.lower(),
        id=file.id.hex(),
        text=identity_text(file),
    )


def _is_drivers(path: str) -> bool:
    return PurePosixPath(path).name.startswith(_DRIVER_LIBRARIES)


def _needed_gpus(manifest: Manifest, found: Inspection) -> tuple[NeededGpu, ...]:
    used: dict[str, int] = defaultdict(int)
    unknown: set[str] = set()
    for task in manifest.tasks:
        if task.kind == MemoryKind.GPU and not task.gpus:
            unknown |= {gpu_uuid(gpu.uuid) for gpu in manifest.gpus}
        for gpu in task.gpus:
            uuid = gpu_uuid(manifest.gpus[gpu.gpu].uuid)
            if gpu.memory_size == TaskGpu.UNKNOWN_SIZE:
                unknown.add(uuid)
            else:
                used[uuid] += gpu.memory_size
    return tuple(
        NeededGpu(
            uuid=gpu.uuid,
            name=gpu.name,
            memory_bytes=None if gpu.uuid in unknown else used[gpu.uuid],
        )
        for gpu in found.needed_gpus()
    )


def _unplaced_bytes(manifest: Manifest, found: Inspection) -> int:
    """As the plugin counts at a restore: of a process of which one size is not known, what the
    other sizes do not make up for."""
    tasks = {task.pid: task.gpus for task in manifest.tasks if task.kind == MemoryKind.GPU}
    unplaced = 0
    for process in found.processes:
        if process.cuda is None or process.cuda.image is None:
            continue
        sizes = [gpu.memory_size for gpu in tasks.get(process.pid, ())]
        known = [size for size in sizes if size != TaskGpu.UNKNOWN_SIZE]
        if not sizes or len(known) < len(sizes):
            unplaced += max(0, process.cuda.image.plain_bytes - sum(known))
    return unplaced
