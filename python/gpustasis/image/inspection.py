# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, gathered from CRIU's images, ours and the statistics beside them."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from gpustasis._core import (
    EncodingTotals,
    GpuInfo,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    TaskGpu,
)
from gpustasis.criu.images import PSTREE_NAME, core_name, parse_comm, parse_pstree
from gpustasis.criu.statistics import Stage, Statistics, parse_statistics, statistics_name
from gpustasis.errors import ImageError
from gpustasis.image.archive_view import ArchiveView
from gpustasis.image.checkpoint import (
    NO_PARENT,
    CheckpointFiles,
    DirectoryFiles,
    FoundSource,
    gpu_uuid,
)

ENCODINGS = ("zero", "lz4", "raw", "ref", "alike")
_KINDS = ("private", "shared", "GPU")  # of regions, by the value of RegionKind

STAGES: tuple[Stage, ...] = ("dump", "restore")

# Of the JSON form. A key that is there keeps its meaning; new ones may come.
INSPECTION_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionView:
    """A run of memory, of the GPU (staged) or the CPU. protection: as in /proc/PID/maps, "rw-"."""

    address: int
    length: int
    protection: str
    kind: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodingView:
    """Chunks stored in one way; plain is memory, stored is the file."""

    chunks: int
    plain_bytes: int
    stored_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuView:
    """A GPU as the manifest names it."""

    uuid: str
    name: str
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceView:
    """Another image that holds chunks of an image: of an earlier checkpoint, in the directory
    `depth` parent links away, or, at depth 0, of the same one.

    directory: where the links lead; None:
    not so far. state: "right", "missing" or "replaced"; "outside": not in the archive, and no
    parent was named.
    """

    checkpoint_id: str
    pid: int
    file: str
    depth: int
    file_bytes: int
    digest: str
    directory: str | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ParentView:
    """The checkpoint that this one was made on top of, itself on top of chain_length - 1 others.

    directory: where the link leads; None: there is no link. state: as of a source.
    """

    checkpoint_id: str
    chain_length: int
    directory: str | None
    state: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageView:
    """The image of one task."""

    file: str
    file_bytes: int
    plain_bytes: int
    digest: str
    chunk_bytes: int
    chunks: int
    start_time: int
    boot_id: str
    encodings: dict[str, EncodingView]
    regions: tuple[RegionView, ...]
    sources: tuple[SourceView, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskGpuView:
    """A GPU that a process could see. number: its place in `gpus`. memory_bytes: that the process
    had in use there; None: not known."""

    number: int
    uuid: str
    memory_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaView:
    """The CUDA side of a process. image: None if its memory stayed in CRIU's own images.

    gpu_source: how it was found out which GPUs it could see, "nvml", "device_files" (sizes are not
    known) or "unknown" (gpus is empty).
    """

    state_before: str
    externalized: bool
    gpu_source: str
    gpus: tuple[TaskGpuView, ...]
    image: ImageView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """One process. ppid 0: the root, or not in CRIU's process tree. comm "": not known, as of a
    packed checkpoint in an archive. cpu_memory:
    None if all of it is in CRIU's own images."""

    pid: int
    ppid: int
    comm: str
    threads: int
    cuda: CudaView | None
    cpu_memory: ImageView | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """A whole checkpoint. Sizes in bytes, times by phase in milliseconds.

    checkpoint_id is None, and the driver unknown, if we saved nothing in it; the driver is unknown
    too if no process used CUDA. parent is None for a checkpoint that needs no other. backend is
    None where no statistics say it, else "driver" or "emulator". layout: how CRIU's images
    are kept, "criu" or "packed". archive: None of a directory.
    """

    directory: str
    checkpoint_id: str | None
    parent: ParentView | None
    backend: str | None
    driver_api_version: int
    driver_version: str
    gpus: tuple[GpuView, ...]
    gpu_image_bytes: int
    cpu_image_bytes: int
    other_bytes: int
    layout: str
    processes: tuple[ProcessView, ...]
    timings_ms: dict[str, dict[str, float]]
    archive: ArchiveView | None = None

    def uses_cuda(self) -> bool:
        """Whether one of its processes used CUDA, as far as we saved it."""
        return any(process.cuda is not None for process in self.processes)

    def needed_gpus(self) -> tuple[GpuView, ...]:
        """Those that a process of the checkpoint could see; all, if that is not known of one."""
        views = [process.cuda for process in self.processes if process.cuda is not None]
        if any(not view.gpus for view in views):
            return self.gpus
        seen = {gpu.number for view in views for gpu in view.gpus}
        return tuple(gpu for number, gpu in enumerate(self.gpus) if number in seen)

    def to_json(self) -> dict[str, Any]:
        """For json.dumps; the keys are the fields above."""
        return {"version": INSPECTION_VERSION, **asdict(self)}


def inspect_directory(directory: Path) -> Inspection:
    """inspect_files of an image directory."""
    return inspect_files(DirectoryFiles(directory))


def inspect_files(files: CheckpointFiles) -> Inspection:
    """Look into a checkpoint without reading memory; earlier checkpoints may be missing.

    Raises ImageError if it is no checkpoint or something in it is damaged, UnsupportedError if it
    needs a newer version of this package.
    """
    manifest = files.manifest()
    cuda = {} if manifest is None else _cuda_views(files, manifest)
    memory = {} if manifest is None else _memory_views(files, manifest)
    packed = manifest is not None and manifest.pack is not None
    processes = _processes(files, cuda, memory, packed)
    if manifest is None and not processes:
        raise ImageError(f"{files.name}: not a checkpoint: neither {PSTREE_NAME} nor a manifest")
    images = [view.image for view in cuda.values() if view.image is not None]
    sizes = files.sizes()
    statistics = _statistics(files)
    return Inspection(
        directory=files.name,
        checkpoint_id=None if manifest is None else manifest.checkpoint_id.hex(),
        parent=None if manifest is None else _parent_view(files, manifest),
        backend=_backend(statistics),
        driver_api_version=0 if manifest is None else manifest.driver_api_version,
        driver_version="" if manifest is None else manifest.driver_version,
        gpus=() if manifest is None else tuple(_gpu_view(gpu) for gpu in manifest.gpus),
        gpu_image_bytes=sum(image.file_bytes for image in images),
        cpu_image_bytes=sum(image.file_bytes for image in memory.values()),
        other_bytes=sum(sizes.values())
        - sum(image.file_bytes for image in (*images, *memory.values())),
        layout="packed" if packed else "criu",
        processes=processes,
        timings_ms={stage: found.phases_ms for stage, found in statistics.items()},
    )


def _backend(statistics: dict[str, Statistics]) -> str | None:
    """Those of a dump of CPU memory alone name none."""
    return next((found.backend for found in statistics.values() if found.backend), None)


def _statistics(files: CheckpointFiles) -> dict[str, Statistics]:
    found = {}
    for stage in STAGES:
        name = statistics_name(stage)
        if (raw := files.read(name)) is not None:
            found[str(stage)] = parse_statistics(raw, files.place(name))
    return found


def _comm(files: CheckpointFiles, pid: int, packed: bool) -> str:
    """packed: what an archive holds of it cannot be read without unpacking all of that."""
    name = core_name(pid)
    raw = files.read(name)
    if raw is None and packed:
        return ""
    if raw is None:
        raise ImageError(f"cannot read {files.place(name)}: there is none")
    return parse_comm(raw, files.place(name))


def _processes(
    files: CheckpointFiles,
    cuda: dict[int, CudaView],
    memory: dict[int, ImageView],
    packed: bool,
) -> tuple[ProcessView, ...]:
    """CRIU's tree, then tasks with images that are not in it (of a pid namespace within)."""
    raw = files.read(PSTREE_NAME)
    tree = () if raw is None else parse_pstree(raw, files.place(PSTREE_NAME))
    known = tuple(
        ProcessView(
            pid=task.pid,
            ppid=task.ppid,
            comm=_comm(files, task.pid, packed),
            threads=len(task.threads),
            cuda=cuda.get(task.pid),
            cpu_memory=memory.get(task.pid),
        )
        for task in tree
    )
    pids = {process.pid for process in known}
    return known + tuple(
        ProcessView(
            pid=pid,
            ppid=0,
            comm="",
            threads=0,
            cuda=cuda.get(pid),
            cpu_memory=memory.get(pid),
        )
        for pid in sorted({*cuda, *memory} - pids)
    )


def _cuda_views(files: CheckpointFiles, manifest: Manifest) -> dict[int, CudaView]:
    return {
        task.pid: _cuda_view(files, manifest, task)
        for task in manifest.tasks
        if task.kind == MemoryKind.GPU
    }


def _memory_views(files: CheckpointFiles, manifest: Manifest) -> dict[int, ImageView]:
    return {
        task.pid: _image_view(files, files.open_image(manifest, task))
        for task in manifest.tasks
        if task.kind == MemoryKind.CPU
    }


def _cuda_view(files: CheckpointFiles, manifest: Manifest, task: ManifestTask) -> CudaView:
    image = None
    if task.externalized:
        image = _image_view(files, files.open_image(manifest, task))
    return CudaView(
        state_before=task.state_before.name.lower(),
        externalized=task.externalized,
        gpu_source=task.gpu_source.name.lower(),
        gpus=tuple(
            TaskGpuView(
                number=gpu.gpu,
                uuid=gpu_uuid(manifest.gpus[gpu.gpu].uuid),
                memory_bytes=None if gpu.memory_size == TaskGpu.UNKNOWN_SIZE else gpu.memory_size,
            )
            for gpu in task.gpus
        ),
        image=image,
    )


def _parent_view(files: CheckpointFiles, manifest: Manifest) -> ParentView | None:
    if manifest.parent_id == NO_PARENT:
        return None
    where, state = files.find_parent(manifest)
    return ParentView(
        checkpoint_id=manifest.parent_id.hex(),
        chain_length=manifest.chain_length,
        directory=where,
        state=state,
    )


def _image_view(files: CheckpointFiles, image: ImageReader) -> ImageView:
    info = image.info
    regions = tuple(
        RegionView(
            address=region.address,
            length=region.length,
            protection=_protection_text(region.protection),
            kind=_KINDS[region.kind.value],
        )
        for region in info.regions
    )
    return ImageView(
        file=info.image_name,
        file_bytes=image.file_size,
        plain_bytes=sum(region.length for region in regions),
        digest=image.digest.hex(),
        chunk_bytes=info.chunk_size,
        chunks=len(image),
        start_time=info.start_time,
        boot_id=info.boot_id.hex(),
        encodings=_encoding_views(image.totals),
        regions=regions,
        sources=tuple(_source_view(found) for found in files.find_sources(info.sources)),
    )


def _source_view(found: FoundSource) -> SourceView:
    return SourceView(
        checkpoint_id=found.source.checkpoint_id.hex(),
        pid=found.source.pid,
        file=found.source.image_name,
        depth=found.source.depth,
        file_bytes=found.source.file_size,
        digest=found.source.digest.hex(),
        directory=None if found.directory is None else str(found.directory),
        state=found.state,
    )


def _encoding_views(totals: EncodingTotals) -> dict[str, EncodingView]:
    found = (totals.zero, totals.lz4, totals.raw, totals.ref, totals.alike)
    return {
        name: EncodingView(chunks=count.chunks, plain_bytes=count.plain, stored_bytes=count.stored)
        for name, count in zip(ENCODINGS, found, strict=True)
    }


def _gpu_view(gpu: GpuInfo) -> GpuView:
    return GpuView(uuid=gpu_uuid(gpu.uuid), name=gpu.name, memory_bytes=gpu.memory_size)


def _protection_text(protection: int) -> str:
    return "".join(
        letter if protection & bit else "-" for letter, bit in (("r", 1), ("w", 2), ("x", 4))
    )
