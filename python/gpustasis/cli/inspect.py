# SPDX-License-Identifier: Apache-2.0
"""`gpustasis inspect CHECKPOINT`: say what a checkpoint holds."""

from __future__ import annotations

from pathlib import Path

import click

import gpustasis
from gpustasis.cli import output
from gpustasis.cli.framework import Command
from gpustasis.cli.options import checkpoint_argument, parent_option
from gpustasis.cli.output import Node
from gpustasis.cli.requirement_rows import NOTHING_SAVED, driver_text, requirements_rows
from gpustasis.criu.statistics import EMULATOR
from gpustasis.image.archive_view import ArchiveView
from gpustasis.image.arena import Tier, stored_directory, tier_at
from gpustasis.image.checkpoint import State
from gpustasis.image.directory import allow_many_files
from gpustasis.image.inspection import (
    ImageView,
    Inspection,
    ParentView,
    ProcessView,
    RegionView,
    TaskGpuView,
)
from gpustasis.text import mib, plural

_SOURCES_SHOWN = 8
_REGIONS_SHOWN = 8  # of a task; --json has them all


@click.command("inspect", cls=Command)
@checkpoint_argument("checkpoint")
@parent_option
@click.option(
    "--requirements",
    "wants_requirements",
    is_flag=True,
    help="Say what a restore needs instead: driver stack, memory of each GPU, mapped files.",
)
def command(checkpoint: Path, parents: tuple[Path, ...], *, wants_requirements: bool) -> None:
    """Say what CHECKPOINT, an image directory or an archive of a container engine, holds:
    processes, GPU memory, CPU memory that gpustasis stored, sizes and times.

    Memory itself is not checked; `gpustasis verify` does that.
    """
    allow_many_files()
    opened = gpustasis.open(checkpoint, parents)
    found = opened.inspect()
    tier = tier_at(checkpoint)
    state = {"state": tier.value}
    if wants_requirements:
        needed = opened.requirements()
        document = {"requirements": None if needed is None else needed.to_json()}
        output.answer(
            found.to_json() | state | document,
            lambda: output.facts(found.directory, requirements_rows(found, needed)),
        )
        return

    def show() -> None:
        rows = _summary(found)
        if tier == Tier.LOCAL:
            place = stored_directory(checkpoint)
            rows.insert(1, ("State", f"local: only in memory yet, in {place}"))
        output.facts(found.directory, rows)
        output.tree(_process_tree(found.processes))

    output.answer(found.to_json() | state, show)


def _summary(found: Inspection) -> list[tuple[str, str]]:
    rows = [
        ("Checkpoint", found.checkpoint_id or NOTHING_SAVED),
        ("Processes", str(len(found.processes))),
    ]
    if found.backend == EMULATOR:
        rows.append(("Backend", "emulator: no real GPU"))
    elif found.backend is not None:
        rows.append(("Backend", found.backend))
    if found.uses_cuda():
        rows.append(("Driver", driver_text(found.driver_api_version, found.driver_version)))
        rows += [
            (f"GPU {number}", f"{gpu.name}, {mib(gpu.memory_bytes)}, {gpu.uuid}")
            for number, gpu in enumerate(found.gpus)
        ]
        rows.append(("GPU memory", _memory_text(_gpu_images(found))))
    if cpu_images := [one.cpu_memory for one in found.processes if one.cpu_memory is not None]:
        rows.append(("CPU memory", _memory_text(cpu_images)))
    if found.parent is not None:
        rows += _parent_rows(found.parent, found.archive is not None)
    if found.archive is not None:
        rows += _archive_rows(found.archive)
    packed = ", CRIU's packed into one file" if found.layout == "packed" else ""
    rows.append(("Other images", mib(found.other_bytes) + packed))
    for stage, phases in found.timings_ms.items():
        rows.append((f"Times, {stage}", ", ".join(f"{k} {v:.1f} ms" for k, v in phases.items())))
    return rows


def _archive_rows(archive: ArchiveView) -> list[tuple[str, str]]:
    pod = "/".join(filter(None, (archive.namespace, archive.pod)))
    facts = [
        ("Engine", archive.engine),
        ("Container", f"{archive.container_name} {archive.container_id[:12]}".strip()),
        ("Pod", pod),
        ("Image", archive.image),
        ("Runtime", archive.runtime),
        ("Created", archive.created),
        ("Checkpointed", archive.checkpointed),
        ("Archive", _sizes_text(archive)),
    ]
    return [(name, text) for name, text in facts if text]


def _sizes_text(archive: ArchiveView) -> str:
    packed = "" if archive.compression == "none" else f", packed with {archive.compression}"
    return (
        f"{mib(archive.file_bytes)}{packed}; checkpoint {mib(archive.checkpoint_bytes)}, root "
        f"file system {mib(archive.rootfs_diff_bytes)}, volumes {mib(archive.volumes_bytes)}"
    )


def _parent_rows(parent: ParentView, in_archive: bool) -> list[tuple[str, str]]:
    nowhere = "not in the archive" if in_archive else "no link to it"
    where = nowhere if parent.directory is None else parent.directory
    return [
        ("Parent", f"{parent.checkpoint_id}: {where}{_state_text(parent.state)}"),
        ("Chain", f"on top of {parent.chain_length}"),
    ]


def _state_text(state: str) -> str:
    return "" if state in (State.RIGHT, State.OUTSIDE) else f" ({state.upper()})"


def _process_tree(processes: tuple[ProcessView, ...]) -> Node:
    tree = Node("Processes")
    nodes: dict[int, Node] = {}
    for process in processes:  # parents come before their children
        node = nodes.get(process.ppid, tree).add(_process_text(process))
        nodes[process.pid] = node
        if process.cuda is not None:
            for gpu in process.cuda.gpus:
                node.add(f"GPU {gpu.number}, {gpu.uuid}{_use_text(gpu)}")
            if process.cuda.image is not None:
                _add_image(node, process.cuda.image)
        if process.cpu_memory is not None:
            _add_image(node, process.cpu_memory)
    return tree


def _process_text(process: ProcessView) -> str:
    text = f"[{process.pid}] {process.comm}".rstrip()
    if process.threads > 1:
        text += f", {process.threads} threads"
    if process.cuda is None:
        return text
    where = "" if process.cuda.externalized else ", GPU memory in CRIU's own images"
    before = process.cuda.state_before
    return text + ", CUDA" + where + ("" if before == "running" else f", was {before} before")


def _add_image(node: Node, image: ImageView) -> None:
    branch = node.add(f"{image.file}: {mib(image.plain_bytes)} in {mib(image.file_bytes)}")
    for name, count in image.encodings.items():
        if count.chunks:
            chunks = plural(count.chunks, "chunk")
            branch.add(f"{name}: {mib(count.plain_bytes)} in {mib(count.stored_bytes)}, {chunks}")
    telling_first = sorted(image.sources, key=lambda source: source.state == State.RIGHT)
    for source in telling_first[:_SOURCES_SHOWN]:
        outside = source.state == State.OUTSIDE
        unknown = f"checkpoint {source.checkpoint_id}" + (
            "" if outside else ", to which no link leads"
        )
        where = (
            f"{source.directory}/{source.file}"
            if source.directory
            else f"{source.file} of {unknown}"
        )
        text = f"alike with {where}" if source.depth == 0 else f"from {where}, depth {source.depth}"
        branch.add(text + _state_text(source.state))
    if len(image.sources) > _SOURCES_SHOWN:
        branch.add(f"and from {len(image.sources) - _SOURCES_SHOWN} more")
    regions = branch.add(plural(len(image.regions), "region"))
    for region in image.regions[:_REGIONS_SHOWN]:
        regions.add(_region_text(region))
    if len(image.regions) > _REGIONS_SHOWN:
        regions.add(f"and {len(image.regions) - _REGIONS_SHOWN} more")


def _use_text(gpu: TaskGpuView) -> str:
    if gpu.memory_bytes is None:
        return ""
    return f": {mib(gpu.memory_bytes)} in use" if gpu.memory_bytes else ": visible, not used"


def _region_text(region: RegionView) -> str:
    end = region.address + region.length
    return f"{region.address:x}-{end:x} {region.protection} {region.kind} {mib(region.length)}"


def _memory_text(images: list[ImageView]) -> str:
    plain, stored = (
        sum(getattr(i, name) for i in images) for name in ("plain_bytes", "file_bytes")
    )
    return f"{mib(plain)} in {mib(stored)} of images"


def _gpu_images(found: Inspection) -> list[ImageView]:
    views = [process.cuda for process in found.processes if process.cuda is not None]
    return [view.image for view in views if view.image is not None]
