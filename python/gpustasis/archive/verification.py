"""Check every byte of our files in an archive."""

from __future__ import annotations

from gpustasis._core import MANIFEST_NAME, Manifest, Source, image_name
from gpustasis.archive.opened import Archive
from gpustasis.archive.parents import Parent
from gpustasis.archive.stored_chunks import (
    OpenImage,
    Places,
    by_source,
    checked,
    own_chunks,
    placed_chunks,
)
from gpustasis.errors import ArchiveError, ImageError, UnsupportedError
from gpustasis.image.verification import OnProgress, Verification

# Places of chunks, by pid of the parent's image that has their bytes.
Wanted = dict[Parent, dict[int, list[Places]]]


def verify_archive(
    archive: Archive, threads: int = 0, on_progress: OnProgress | None = None
) -> Verification:
    """Check the manifest and every image; go on after a problem with the next image.

    Chunks in earlier checkpoints are checked in the parents that were named when the archive was
    opened; if none were, they are counted as outside. threads: 0 for as many as processors.
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
            "no GPU state saved by gpustasis"
        )
        return found
    images = _open_images(archive, manifest, found)
    try:
        _check_own(archive, images, threads, on_progress, found)
        _check_earlier(archive, images, threads, found)
    except ArchiveError as exc:
        found.problems.append(str(exc))
    for image in images.values():
        found.images += 1
        found.plain_bytes += image.plain_bytes()
    wanted = {task.pid for task in manifest.tasks if task.externalized}
    there = {*archive.image_files, *archive.damaged_files}
    found.problems += [
        f"{archive.place(image_name(pid))}: not named by the manifest"
        for pid in sorted(there - wanted)
    ]
    return found


def _open_images(archive: Archive, manifest: Manifest, found: Verification) -> dict[int, OpenImage]:
    images = {}
    for task in manifest.tasks:
        if not task.externalized:
            continue
        try:
            images[task.pid] = OpenImage(
                task.pid, archive.open_image(manifest, task), archive.hollow_image(task.pid)
            )
        except (ImageError, UnsupportedError) as exc:
            found.problems.append(str(exc))
    return images


def _check_own(
    archive: Archive,
    images: dict[int, OpenImage],
    threads: int,
    on_progress: OnProgress | None,
    found: Verification,
) -> None:
    """What is in the archive itself; a damaged image is taken out of `images`."""
    done = dict.fromkeys(images, 0)
    for _, reader, pid in archive.images_again():
        if pid not in images:
            continue
        total = images[pid].plain_bytes()
        try:
            for chunk, _stored in checked(own_chunks(images[pid], reader), threads):
                done[pid] += chunk.plain_size
                if on_progress is not None:
                    on_progress(image_name(pid), done[pid], total)
        except ArchiveError:
            raise
        except ImageError as exc:
            found.problems.append(str(exc))
            del images[pid]
    if on_progress is not None:
        for pid, image in images.items():
            on_progress(image_name(pid), image.plain_bytes(), image.plain_bytes())


def _check_earlier(
    archive: Archive, images: dict[int, OpenImage], threads: int, found: Verification
) -> None:
    """What earlier checkpoints hold, if they were named."""
    earlier, outside = set(), set()
    wanted: Wanted = {}
    for image in list(images.values()):
        referred = image.reader.totals.ref.plain
        sources = image.reader.info.sources
        if not archive.parents:
            found.outside_bytes += referred
            outside |= {source.checkpoint_id.hex() for source in sources}
            continue
        try:
            collect(archive, image, wanted)
        except ImageError as exc:
            found.problems.append(str(exc))
            del images[image.pid]
            continue
        found.earlier_bytes += referred
        earlier |= {source.checkpoint_id for source in sources}
    found.outside_checkpoints = sorted(outside)
    found.earlier_checkpoints = len(earlier)
    for parent, by_file in wanted.items():
        for pid, stream in parent.image_streams(by_file.keys()):
            try:
                for _ in checked(placed_chunks(by_file[pid], stream), threads):
                    pass
            except ArchiveError:
                raise
            except ImageError as exc:
                found.problems.append(f"{exc} (in {image_name(pid)} of {parent.path})")


def collect(archive: Archive, image: OpenImage, wanted: Wanted) -> None:
    """Add the places of an image's chunks in earlier checkpoints to `wanted`.

    Raises ImageError that names the first checkpoint that is not there.
    """
    sources = image.reader.info.sources
    parents: list[Parent] = []
    for source in sources:
        parent = archive.parents.find(source)
        if parent is None:
            raise ImageError(missing_source(archive, image, source))
        parents.append(parent)
    for number, places in by_source(image).items():
        source, parent = sources[number - 1], parents[number - 1]
        by_file = wanted.setdefault(parent, {})
        by_file.setdefault(source.pid, []).append(places)


def missing_source(archive: Archive, image: OpenImage, source: Source) -> str:
    """A sentence that says which earlier image is needed."""
    return (
        f"{image.hollow.place}: needs {image_name(source.pid)} of checkpoint "
        f"{source.checkpoint_id.hex()}, {source.depth} before this one, which is not in "
        f"{archive.name} and no --parent holds"
    )
