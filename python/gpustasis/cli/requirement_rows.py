# SPDX-License-Identifier: Apache-2.0
"""What `gpustasis inspect --requirements` shows people."""

from __future__ import annotations

from gpustasis.image.inspection import Inspection
from gpustasis.image.requirements import MappedFile, NeededGpu, RequirementsView
from gpustasis.text import mib, plural

NOTHING_SAVED = "nothing in it was saved by gpustasis"


def requirements_rows(found: Inspection, needed: RequirementsView | None) -> list[tuple[str, str]]:
    """Name and text of each requirement."""
    if needed is None:
        return [("Checkpoint", NOTHING_SAVED)]
    rows = [("Checkpoint", found.checkpoint_id or "")]
    if found.uses_cuda():
        driver = driver_text(needed.driver_api_version, needed.driver_version)
        libraries = "with these libraries" if needed.driver_libraries else "or newer"
        rows.append(("Driver", f"{driver}, {libraries}"))
    rows += [("", f"{file.path}: {file.text}") for file in needed.driver_libraries]
    rows += [(f"GPU {number}", _gpu_text(gpu)) for number, gpu in enumerate(needed.gpus)]
    if needed.unplaced_bytes:
        rows.append(("GPU memory", f"{mib(needed.unplaced_bytes)}, not known on which GPU"))
    return rows + _file_rows(needed)


def driver_text(api_version: int, version: str) -> str:
    """Of a driver: "580.95.05, CUDA 13.0"."""
    major, minor = divmod(api_version, 1000)
    api = f"CUDA {major}.{minor // 10}" if api_version else "unknown"
    return f"{version}, {api}" if version else api


def _gpu_text(gpu: NeededGpu) -> str:
    free = "not known how much" if gpu.memory_bytes is None else mib(gpu.memory_bytes)
    return f"{gpu.name}, {free} free; was {gpu.uuid}"


def _file_rows(needed: RequirementsView) -> list[tuple[str, str]]:
    if needed.files is None:
        return [("Mapped files", "not recorded")]
    missed = f"; {needed.unrecorded} not recorded" if needed.unrecorded else ""
    rows = [("Mapped files", plural(len(needed.files), "file") + missed)]
    return rows + [("", _file_text(file)) for file in needed.files]


def _file_text(file: MappedFile) -> str:
    where = "" if file.place == "host" else f" ({file.place})"
    return f"{file.path}{where}: {file.text}"
