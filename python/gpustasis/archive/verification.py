# SPDX-License-Identifier: Apache-2.0
"""Check every byte of our files in an archive."""

from __future__ import annotations

from collections.abc import Iterator

from gpustasis._core import MANIFEST_NAME, PACK_NAME, Manifest, MemoryKind
from gpustasis.archive.chunks import (
    Parent,
    Places,
    StoredChunk,
    StoredImage,
    checked,
    own_chunks,
    placed_chunks,
    places_by_source,
)
from gpustasis.archive.opened import Archive
from gpustasis.criu.images import INVENTORY_NAME, parse_inventory_plugins
from gpustasis.errors import ArchiveError, ImageError, UnsupportedError
from gpustasis.image.checkpoint import whose
from gpustasis.image.verification import OnProgress, Stored, Verification, require_all_listed

# Places of chunks, by who has the image with their bytes, and its name.
Wanted = dict[Parent, dict[str, list[Places]]]


def verify_archive(
    archive: Archive, threads: int = 0, on_progress: OnProgress | None = None
) -> Verification:
    """Check the manifest and every image; go on after a problem with the next image.

    Chunks that are alike are checked in the image that holds them, those in earlier checkpoints in
    the parents that were named when the archive was opened; if none were, they are counted as
    outside. threads: 0 for as many as processors.
    Nothing is raised for what is found.
    """
    found = Verification()
    try:
        manifest = archive.manifest()
    except (ImageError, UnsupportedError) as exc:
        found.problems.append(str(exc))
        return found
    if manifest is None:
        found.problems.append(
            f"{archive.place(MANIFEST_NAME)}: missing: the checkpoint was never finished, or has "
            "nothing of gpustasis's in it"
        )
        return found
    images = _images(archive, manifest, found)
    try:
        if (pack := archive.stored_pack(manifest)) is not None:
            images[PACK_NAME] = pack
    except (ImageError, UnsupportedError) as exc:
        found.problems.append(str(exc))
    if not found.problems:
        _check_inventory(archive, manifest, images, found)
    try:
        _check_own(archive, images, threads, on_progress, found)
        _check_others(archive, images, threads, found)
    except ArchiveError as exc:
        found.problems.append(str(exc))
    if (pack := images.pop(PACK_NAME, None)) is not None:
        found.packed_bytes = pack.plain_bytes()
    found.images = len(images)
    found.plain_bytes = sum(image.plain_bytes() for image in images.values())
    found.cpu_bytes = sum(
        image.plain_bytes() for image in images.values() if image.reader.info.kind == MemoryKind.CPU
    )
    wanted = {task.image_name for task in manifest.tasks if task.externalized}
    found.problems += [
        f"{archive.place(name)}: not named by the manifest"
        for name in sorted({*archive.images, *archive.damaged_images} - wanted - {PACK_NAME})
    ]
    return found


def _images(archive: Archive, manifest: Manifest, found: Verification) -> dict[str, StoredImage]:
    images = {}
    for task in manifest.tasks:
        if not task.externalized:
            continue
        try:
            images[task.image_name] = archive.stored_image(manifest, task)
        except (ImageError, UnsupportedError) as exc:
            found.problems.append(str(exc))
    return images


def _check_inventory(
    archive: Archive, manifest: Manifest, images: dict[str, StoredImage], found: Verification
) -> None:
    try:
        inventory = archive.read(INVENTORY_NAME)
        if inventory is None:
            return
        plugins = parse_inventory_plugins(inventory, archive.place(INVENTORY_NAME))
        stored: Stored = [
            (task, images[task.image_name].reader.info.regions if task.externalized else [])
            for task in manifest.tasks
        ]
        require_all_listed(plugins, stored, archive.place(MANIFEST_NAME))
    except ImageError as exc:
        found.problems.append(str(exc))


def _check_own(
    archive: Archive,
    images: dict[str, StoredImage],
    threads: int,
    on_progress: OnProgress | None,
    found: Verification,
) -> None:
    """What is in the archive itself; a damaged image is taken out of `images`."""
    tell = on_progress or (lambda _, done, total: None)
    for name, stream in archive.image_streams(dict(images)):
        done, total = 0, images[name].plain_bytes()
        try:
            for chunk in checked(own_chunks(images[name], stream), threads):
                done += chunk.info.plain_size
                tell(name, done, total)
            tell(name, total, total)
        except ArchiveError:
            raise
        except ImageError as exc:
            found.problems.append(str(exc))
            del images[name]


def _check_others(
    archive: Archive, images: dict[str, StoredImage], threads: int, found: Verification
) -> None:
    """What other images of the archive hold, and earlier checkpoints, if they were named."""
    earlier, outside = set(), set()
    wanted: Wanted = {}
    for name, image in list(images.items()):
        totals = image.reader.totals
        sources = {source.checkpoint_id for source in image.reader.info.sources if source.depth}
        try:
            collect(archive, image, wanted, alike_only=not archive.parents)
        except ImageError as exc:
            found.problems.append(str(exc))
            del images[name]
            continue
        found.alike_bytes += totals.alike.plain
        if archive.parents:
            found.earlier_bytes += totals.ref.plain
            earlier |= sources
        else:
            found.outside_bytes += totals.ref.plain
            outside |= sources
    found.outside_checkpoints = sorted(source.hex() for source in outside)
    found.earlier_checkpoints = len(earlier)
    for parent, by_name in wanted.items():
        for name, stream in parent.image_streams(by_name):
            try:
                for _ in checked(placed_chunks(by_name[name], stream), threads):
                    pass
            except ArchiveError:
                raise
            except ImageError as exc:
                found.problems.append(f"{exc} (in {name} of {parent.path})")


def collect(
    archive: Archive, image: StoredImage, wanted: Wanted, *, alike_only: bool = False
) -> None:
    """Add the places of an image's chunks in other images to `wanted`; alike_only: not of those of
    earlier checkpoints.

    Raises ImageError that names the first image that is not there.
    """
    sources = image.reader.info.sources
    holders: dict[int, Parent] = {}
    for number, source in enumerate(sources, 1):
        if source.depth and alike_only:
            continue
        holder = archive.holder(source)
        if holder is None:
            elsewhere = " and no --parent holds" if source.depth else ""
            raise ImageError(
                f"{image.place}: needs {whose(source)}, which is not in {archive.name}{elsewhere}"
            )
        holders[number] = holder
    for number, places in places_by_source(image).items():
        if number in holders:
            by_name = wanted.setdefault(holders[number], {})
            by_name.setdefault(sources[number - 1].image_name, []).append(places)


def other_chunks(wanted: Wanted, threads: int) -> Iterator[StoredChunk]:
    """All that was collected, checked. Raises ImageError."""
    for parent, by_name in wanted.items():
        for name, stream in parent.image_streams(by_name):
            yield from checked(placed_chunks(by_name[name], stream), threads)
