"""`gpustasis inspect CHECKPOINT`: say what a checkpoint holds."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.tree import Tree

from gpustasis._core import image_name
from gpustasis.archive.inspection import inspect_archive
from gpustasis.archive.opened import Archive
from gpustasis.archive.opening import open_files
from gpustasis.cli.options import checkpoint_argument, parent_option
from gpustasis.criu.statistics import EMULATOR
from gpustasis.image.chain import State
from gpustasis.image.inspection import (
    ArchiveView,
    ImageView,
    Inspection,
    ParentView,
    ProcessView,
    RegionView,
    inspect_files,
)
from gpustasis.image.lock import allow_many_files

_FILE_WIDTH = 160  # columns, where no terminal says how many there are
_SOURCES_SHOWN = 8
_REGIONS_SHOWN = 8  # of a task; --json has them all


@click.command("inspect")
@checkpoint_argument("checkpoint")
@parent_option
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(checkpoint: Path, parents: tuple[Path, ...], as_json: bool) -> None:
    """Say what CHECKPOINT, an image directory or an archive of a container engine, holds:
    processes, GPU memory, sizes and times.

    GPU memory itself is not checked; `gpustasis verify` does that.
    """
    show(checkpoint, parents, as_json)


def show(checkpoint: Path, parents: tuple[Path, ...], as_json: bool) -> None:
    """What the command does. Raises CheckpointError."""
    allow_many_files()
    with open_files(checkpoint, parents) as files:
        found = inspect_archive(files) if isinstance(files, Archive) else inspect_files(files)
    if as_json:
        click.echo(json.dumps(found.to_json(), indent=2))
        return
    console = Console()
    if not console.is_terminal:
        console.width = _FILE_WIDTH
    console.print(_summary(found))
    console.print(_process_tree(found.processes))


def _summary(found: Inspection) -> Table:
    table = Table(title=escape(found.directory), show_header=False, title_justify="left")
    gpu_bytes = sum(image.plain_bytes for image in _images(found))
    rows = [
        ("Checkpoint", found.checkpoint_id or "no GPU state saved by gpustasis"),
        ("Processes", str(len(found.processes))),
    ]
    if found.backend == EMULATOR:
        rows.append(("Backend", "emulator: no real GPU"))
    elif found.backend is not None:
        rows.append(("Backend", found.backend))
    if found.checkpoint_id is not None:
        rows.append(("Driver", _driver_text(found)))
        rows += [("GPU", f"{gpu.name}, {_mib(gpu.memory_bytes)}, {gpu.uuid}") for gpu in found.gpus]
        rows.append(("GPU memory", f"{_mib(gpu_bytes)} in {_mib(found.gpu_image_bytes)} of images"))
    if found.parent is not None:
        rows += _parent_rows(found.parent, found.archive is not None)
    if found.archive is not None:
        rows += _archive_rows(found.archive)
    rows.append(("Other images", _mib(found.other_bytes)))
    for stage, phases in found.timings_ms.items():
        rows.append((f"Times, {stage}", ", ".join(f"{k} {v:.1f} ms" for k, v in phases.items())))
    for name, text in rows:
        table.add_row(name, _shown(text))
    return table


def _shown(text: str) -> str:
    """Of a stranger's text: nothing in it is markup, or moves the cursor."""
    return escape("".join(char if char.isprintable() else "\ufffd" for char in text))


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
        f"{_mib(archive.file_bytes)}{packed}; checkpoint {_mib(archive.checkpoint_bytes)}, root "
        f"file system {_mib(archive.rootfs_diff_bytes)}, volumes {_mib(archive.volumes_bytes)}"
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


def _process_tree(processes: tuple[ProcessView, ...]) -> Tree:
    tree = Tree("Processes")
    nodes: dict[int, Tree] = {}
    for process in processes:  # parents come before their children
        node = nodes.get(process.ppid, tree).add(_shown(_process_text(process)))
        nodes[process.pid] = node
        if process.cuda is not None and process.cuda.image is not None:
            _add_image(node, process.cuda.image)
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


def _add_image(node: Tree, image: ImageView) -> None:
    branch = node.add(
        escape(f"{image.file}: {_mib(image.plain_bytes)} in {_mib(image.file_bytes)}")
    )
    for name, count in image.encodings.items():
        if count.chunks:
            chunks = f"{count.chunks} chunk{'s' if count.chunks > 1 else ''}"
            branch.add(f"{name}: {_mib(count.plain_bytes)} in {_mib(count.stored_bytes)}, {chunks}")
    stripes = sum(source.depth == 0 for source in image.sources)
    if stripes:
        branch.add(f"chunk data in {stripes + 1} files")
    earlier = [source for source in image.sources if source.depth > 0]
    telling_first = sorted(earlier, key=lambda source: source.state == State.RIGHT)
    for source in telling_first[:_SOURCES_SHOWN]:
        outside = source.state == State.OUTSIDE
        nowhere = f"checkpoint {source.checkpoint_id}" if outside else "no link leads to it"
        where = source.directory or nowhere
        text = f"from {where}/{image_name(source.pid, source.stripe)}, depth {source.depth}"
        branch.add(escape(text + _state_text(source.state)))
    if len(earlier) > _SOURCES_SHOWN:
        branch.add(f"and from {len(earlier) - _SOURCES_SHOWN} more")
    regions = branch.add(f"{len(image.regions)} regions")
    for region in image.regions[:_REGIONS_SHOWN]:
        regions.add(escape(_region_text(region)))
    if len(image.regions) > _REGIONS_SHOWN:
        regions.add(f"and {len(image.regions) - _REGIONS_SHOWN} more")


def _region_text(region: RegionView) -> str:
    end = region.address + region.length
    return f"{region.address:x}-{end:x} {region.protection} {region.kind} {_mib(region.length)}"


def _driver_text(found: Inspection) -> str:
    major, minor = divmod(found.driver_api_version, 1000)
    api = f"CUDA {major}.{minor // 10}" if found.driver_api_version else "unknown"
    return f"{found.driver_version}, {api}" if found.driver_version else api


def _images(found: Inspection) -> list[ImageView]:
    views = [process.cuda for process in found.processes if process.cuda is not None]
    return [view.image for view in views if view.image is not None]


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
