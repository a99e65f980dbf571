"""A manifest that lies in memory, as the core's reader would give it."""

from __future__ import annotations

from gpustasis._core import (
    GpuInfo,
    GpuSource,
    Manifest,
    ManifestTask,
    ProcessState,
    TaskGpu,
)
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.plain_manifest import parse_manifest


def parse_core_manifest(file: bytes, path: str) -> Manifest:
    """Take a manifest apart; `path` is for messages. Raises ImageError, UnsupportedError."""
    try:
        found = parse_manifest(file)
    except ImageError as exc:
        raise ImageError(f"{path}: {exc}") from exc
    except UnsupportedError as exc:
        raise UnsupportedError(f"{path}: {exc}") from exc
    return Manifest(
        checkpoint_id=found.checkpoint_id,
        driver_api_version=found.driver_api_version,
        driver_version=_decoded(found.driver_version),
        gpus=[GpuInfo(gpu.uuid, _decoded(gpu.name), gpu.memory_size) for gpu in found.gpus],
        tasks=[
            ManifestTask(
                pid=task.pid,
                externalized=task.externalized,
                digest=task.digest,
                state_before=ProcessState(task.state_before),
                gpu_source=GpuSource(task.gpu_source),
                gpus=[TaskGpu(gpu.gpu, gpu.memory_size) for gpu in task.gpus],
            )
            for task in found.tasks
        ],
        parent_id=found.parent_id,
        chain_length=found.chain_length,
    )


def _decoded(text: bytes) -> str:
    return text.decode("utf-8", "surrogateescape")
