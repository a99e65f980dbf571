# SPDX-License-Identifier: Apache-2.0
"""Check every byte of our files in an image directory."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path

from gpustasis._core import (
    ARENA_MARKER,
    MANIFEST_NAME,
    SEALED_NAME,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    Region,
    stored_memory_digest,
)
from gpustasis.criu.images import INVENTORY_NAME, inventory_plugins
from gpustasis.errors import ImageError, SealError, UnsupportedError
from gpustasis.image.arena import stored_directory
from gpustasis.image.checkpoint import (
    find_manifest,
    image_errors,
    image_names,
    open_image,
    plain_size,
    require_not_sealed,
)
from gpustasis.image.directory import is_there, shared
from gpustasis.image.pack import verify_pack

STOCK_PLUGIN = "cuda_plugin"  # as inventory.img names CRIU's own
_OWN_PLUGIN = "gpustasis"  # and our own
_NAMES_IMAGES = "names-images"  # docs/format.md, "What CRIU's inventory says"

# Name of a file, bytes of memory done, bytes of memory in all.
OnProgress = Callable[[str, int, int], object]
Stored = list[tuple[ManifestTask, list[Region]]]


@dataclass(slots=True)
class Verification:
    """What was found. problems: a sentence each, with file and, of a chunk, number and address.

    cpu_bytes: those of plain_bytes that are CPU memory; the others are GPU memory.
    earlier_bytes: those of plain_bytes that were read from earlier_checkpoints others. alike_bytes:
    those that are stored once, in another image of the same checkpoint.
    packed_files, packed_bytes: CRIU's images in the pack, all of which was checked.
    outside_bytes: those that lie in outside_checkpoints others (their ids, in hexadecimal), which
    are not in the archive, and were not checked: no parent was named.
    """

    images: int = 0
    plain_bytes: int = 0
    cpu_bytes: int = 0
    packed_files: int = 0
    packed_bytes: int = 0
    earlier_bytes: int = 0
    earlier_checkpoints: int = 0
    alike_bytes: int = 0
    outside_bytes: int = 0
    outside_checkpoints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)


def verify_directory(
    directory: Path,
    threads: int = 0,
    on_progress: OnProgress | None = None,
    damage: list[str] | None = None,
) -> Verification:
    """Check the manifest in `directory` and every image; go on after a problem with the next file.

    Chunks that another image holds are read and checked there.
    threads: 0 for as many as there are processors. damage: the problems that are damage for certain
    are added to it as well: what was read is wrong, and nobody has refused to read it just then.
    Nothing is raised for what is found; a directory that cannot be listed, or is sealed, raises
    ImageError.
    """
    require_not_sealed(directory)
    place = stored_directory(directory)
    found = _Found(Verification(), [] if damage is None else damage)
    # Where it is drained meanwhile, what is in memory is still there then.
    with shared(() if place == directory else (place,)):
        _verify(directory, place, threads, on_progress, found)
    return found.all


@dataclass(frozen=True, slots=True)
class _Found:
    all: Verification
    damage: list[str]

    def add(self, error: ImageError | UnsupportedError, where: str = "") -> None:
        text = f"{where}{error}"
        self.all.problems.append(text)
        if _is_damage(error):
            self.damage.append(text)


def _is_damage(error: ImageError | UnsupportedError) -> bool:
    """Not where the system has refused: a disk or a server that does not answer now, or this
    process being out of something. Nor where only a later version understands what is there."""
    if isinstance(error, SealError | UnsupportedError):
        return False
    cause = error.__cause__
    while cause is not None:
        if isinstance(cause, OSError):
            return False
        cause = cause.__cause__
    return True


def _verify(
    directory: Path, place: Path, threads: int, on_progress: OnProgress | None, found: _Found
) -> None:
    """place: of manifest and images."""
    names = image_names(place)
    try:
        manifest = find_manifest(place)
    except (ImageError, UnsupportedError) as exc:
        found.add(exc, f"{directory}: ")
        return
    if manifest is None:
        found.all.problems.append(_why_no_manifest(directory))
        return
    stored = _check_images(place, manifest, threads, on_progress, found)
    _check_pack(directory, manifest, threads, found)
    if not found.all.problems:
        try:
            require_all_in(directory, stored)
        except ImageError as exc:
            found.add(exc)
    wanted = {task.image_name for task in manifest.tasks if task.externalized}
    found.all.problems += [
        f"{place / name}: not named by the manifest" for name in names if name not in wanted
    ]


def _check_pack(directory: Path, manifest: Manifest, threads: int, found: _Found) -> None:
    try:
        pack = verify_pack(directory, manifest, threads)
    except (ImageError, UnsupportedError) as exc:
        found.add(exc)
        return
    if pack is not None:
        found.all.packed_files, found.all.packed_bytes = len(pack.files), pack.size


def require_all_in(directory: Path, stored: Stored) -> None:
    """Raise ImageError if CRIU's inventory in `directory` cannot be read, or as
    require_all_listed."""
    if is_there(directory / INVENTORY_NAME):
        plugins = inventory_plugins(directory)
        require_all_listed(plugins, stored, str(directory / MANIFEST_NAME))


def require_all_listed(plugins: Collection[str], stored: Stored, manifest: str, /) -> None:
    """Raise ImageError if, as `plugins` of CRIU's inventory say, the dump has put other memory into
    images of ours than `stored`. manifest: its path, for the message."""
    if _NAMES_IMAGES in plugins and f"images-{stored_memory_digest(stored).hex()}" not in plugins:
        raise ImageError(
            f"{manifest}: does not list the memory that the dump has left out of CRIU's images: a "
            "process would run without it"
        )


def require_no_manifest(directory: Path) -> None:
    """Of a directory without one: raise ImageError if CRIU's inventory says that one belongs to it,
    or cannot be read."""
    if any(name in (_OWN_PLUGIN, _NAMES_IMAGES) for name in inventory_plugins(directory)):
        raise ImageError(
            f"{directory / MANIFEST_NAME}: missing: CRIU's inventory says that it belongs here"
        )


def is_of_criu_alone(directory: Path) -> bool:
    """Whether a checkpoint is there of which CRIU has all: an inventory, and nothing that says that
    a manifest belongs to it. Raises ImageError if that cannot be read now."""
    named = (MANIFEST_NAME, SEALED_NAME, ARENA_MARKER)
    if any(is_there(directory / name) for name in named):
        return False
    if not is_there(directory / INVENTORY_NAME):
        return False
    try:
        require_no_manifest(directory)
    except ImageError as exc:
        if exc.errno is not None:
            raise
        return False  # it is empty or damaged, as after a loss of power, or names one
    return True


def _why_no_manifest(directory: Path) -> str:
    """A sentence for a directory that has none."""
    if not os.path.lexists(directory / INVENTORY_NAME):
        return (
            f"{directory / MANIFEST_NAME}: missing: the checkpoint was never finished, or there is "
            "neither a checkpoint here nor one of gpustasis's in a directory below"
        )
    try:
        plugins = inventory_plugins(directory)
        require_no_manifest(directory)
    except ImageError as exc:
        return str(exc)
    if STOCK_PLUGIN in plugins:
        return (
            f"{directory}: was made with CRIU's own CUDA plugin: its GPU memory is in CRIU's "
            "images, which have no checksums, so it cannot be verified"
        )
    return f"{directory}: is a checkpoint of CRIU alone, with nothing of gpustasis's to verify"


def _check_images(
    directory: Path,
    manifest: Manifest,
    threads: int,
    on_progress: OnProgress | None,
    found: _Found,
) -> Stored:
    """Every task, with the regions of its image if that is there."""
    earlier: set[bytes] = set()
    stored: Stored = []
    for task in manifest.tasks:
        if not task.externalized:
            stored.append((task, []))
            continue
        try:
            image = open_image(directory, manifest, task)
        except (ImageError, UnsupportedError) as exc:
            found.add(exc)
            continue
        try:
            _check_content(image, task.image_name, threads, on_progress)
        except (ImageError, UnsupportedError) as exc:
            found.add(exc)
            continue
        stored.append((task, image.info.regions))
        found.all.images += 1
        found.all.plain_bytes += plain_size(image)
        if task.kind == MemoryKind.CPU:
            found.all.cpu_bytes += plain_size(image)
        found.all.earlier_bytes += image.totals.ref.plain
        found.all.alike_bytes += image.totals.alike.plain
        earlier |= {source.checkpoint_id for source in image.info.sources if source.depth}
    found.all.earlier_checkpoints = len(earlier)
    return stored


def _check_content(
    image: ImageReader, name: str, threads: int, on_progress: OnProgress | None
) -> None:
    total = plain_size(image)
    tell = None if on_progress is None else lambda done: on_progress(name, done, total)
    with image_errors():
        image.attach_sources()
        image.verify(threads, tell)
