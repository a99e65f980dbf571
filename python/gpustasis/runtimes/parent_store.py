# SPDX-License-Identifier: Apache-2.0
"""Earlier checkpoints that an archive is built on, put where a restore looks for them.

A restore that finds no parent where the link leads looks for its id below /var/lib/gpustasis
(docs/format.md, "Links"). On another host than that of the dump, it has to be brought there.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from gpustasis._core import MANIFEST_NAME, PARENT_LINK, Manifest
from gpustasis.archive.chunks import StoredImage, checked, own_chunks
from gpustasis.archive.layout import CHECKPOINT
from gpustasis.archive.opened import Archive, open_archive
from gpustasis.archive.stream import ByteStream, FileStream
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import open_new, open_own_directory, sync, sync_directory
from gpustasis.image.checkpoint import (
    NO_PARENT,
    STORE_ROOT,
    find_checkpoint,
    find_manifest,
    image_errors,
    image_names,
    open_image,
)
from gpustasis.image.directory import share, try_exclude
from gpustasis.image.store import trash_name

_CHUNK = 1 << 20  # bytes read at a time
_MODE = 0o700
_TAKEN = (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR)  # of a rename: something is there already


def keep_parents(archives: Sequence[Path]) -> None:
    """Unpack our images of these archives to STORE_ROOT/checkpoints/ID, unless they are on this
    machine already, and sound: every byte is read. What is there and damaged is replaced.

    Raises ImageError for a bad archive, one whose images are damaged, or if what is there is
    locked; CheckpointError for one without such images, or if they cannot be written; what is there
    then is whole, checked, and on the disk.
    """
    for path in archives:
        with open_archive(path) as archive:
            _keep(archive)


def require_parent(archive: Archive) -> None:
    """Raise CheckpointError, which names it, if the checkpoint that this one is built on is not on
    this machine."""
    manifest = archive.manifest()
    if manifest is None or manifest.parent_id == NO_PARENT:
        return
    if find_checkpoint(manifest.parent_id) is None:
        link = archive.members.get(CHECKPOINT + PARENT_LINK)
        where = f" (it was {link.target})" if link is not None else ""
        raise CheckpointError(
            f"{archive.name} is built on checkpoint {manifest.parent_id.hex()}{where}, which is "
            f"not below {STORE_ROOT}: bring it there, or name its archive with --import-parent"
        )


def _keep(archive: Archive) -> None:
    manifest = archive.manifest()
    if manifest is None:
        raise CheckpointError(f"{archive.name} is no parent: it holds nothing that gpustasis saved")
    checkpoint_id = manifest.checkpoint_id
    found = find_checkpoint(checkpoint_id)
    if found is not None and not _damage(found):
        return
    place = STORE_ROOT / "checkpoints"
    part = place / f".{checkpoint_id.hex()}.{os.getpid()}"
    try:
        os.close(open_own_directory(str(place), 2, _MODE))
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(_MODE)
        try:
            _unpack(archive, manifest, part)
            try:
                part.rename(place / checkpoint_id.hex())
            except OSError as exc:
                if exc.errno not in _TAKEN:
                    raise
                _replace(place / checkpoint_id.hex(), part, manifest)
            sync_directory(place)
        finally:
            shutil.rmtree(part, ignore_errors=True)
    except OSError as exc:
        raise CheckpointError(
            f"cannot put checkpoint {checkpoint_id.hex()} of {archive.name} below {place}: "
            f"{exc.strerror}"
        ) from exc


def _replace(damaged: Path, part: Path, manifest: Manifest) -> None:
    """Put `part`, which has this manifest, where a damaged checkpoint is; whoever dies in between
    leaves none there. Raises CheckpointError if that is in use, more than what `_unpack` writes, or
    has other images; ImageError as share; and OSError."""
    if os.path.islink(damaged) or not os.path.isdir(damaged):
        raise CheckpointError(f"{damaged} is no directory: look who made it, and remove it")
    lock = try_exclude(damaged)
    if lock is None:
        raise CheckpointError(f"{damaged} is damaged, and cannot be replaced: it is in use")
    with lock:
        what = _damage_of_locked(damaged)
        if not what:
            return  # another import has just brought the same
        ours = {MANIFEST_NAME, PARENT_LINK, *image_names(damaged)}
        others = sorted(path.name for path in damaged.iterdir() if path.name not in ours)
        if others:
            raise CheckpointError(
                f"{damaged} is damaged ({what}), and not replaced since it also holds "
                f"{others[0]}: move it away"
            )
        if _has_other_images(damaged, manifest):
            raise CheckpointError(
                f"{damaged} is damaged ({what}), and not replaced: the archive has other images of "
                "the same checkpoint, such as a flattened copy: move it away"
            )
        if os.path.islink(damaged / PARENT_LINK):  # no archive's own leads anywhere here
            (part / PARENT_LINK).symlink_to(os.readlink(damaged / PARENT_LINK))
            sync_directory(part)
        _exchange(damaged, part)


def _has_other_images(damaged: Path, manifest: Manifest) -> bool:
    """Whether it can be told that those of `damaged` were not the ones that `manifest` names:
    checkpoints that are built on it refer to its images by their digests."""
    try:
        found = find_manifest(damaged)
    except ImageError:
        return False
    return found is not None and _images_of(found) != _images_of(manifest)


def _images_of(manifest: Manifest) -> set[tuple[str, bytes]]:
    return {(task.image_name, task.digest) for task in manifest.tasks if task.externalized}


def _exchange(damaged: Path, part: Path) -> None:
    """Another import may put the same there between the two renames: if it is sound, that will do.
    Raises as _replace."""
    trash = damaged.with_name(trash_name())
    damaged.rename(trash)
    try:
        part.rename(damaged)
        sync_directory(damaged.parent)
    except OSError as exc:
        if exc.errno not in _TAKEN:
            with suppress(OSError):
                trash.rename(damaged)
            raise
        if what := _damage(damaged):
            raise CheckpointError(f"{damaged}, put there just now, is damaged: {what}") from exc
    finally:
        shutil.rmtree(trash, ignore_errors=True)


def _damage(directory: Path) -> str:
    """What is wrong with the images that lie there; "": nothing. Raises UnsupportedError, and
    ImageError as share: what is locked is not damaged."""
    with share(directory):
        return _damage_of_locked(directory)


def _damage_of_locked(directory: Path) -> str:
    try:
        manifest = find_manifest(directory)
        if manifest is None:
            return "no manifest"
        for task in manifest.tasks:
            if task.externalized:
                image = open_image(directory, manifest, task)
                with image_errors():
                    found = image.find_damage(0, len(image), [0])
                if found:
                    return found[0][1]
    except ImageError as exc:
        return str(exc)
    return ""


def _unpack(archive: Archive, manifest: Manifest, part: Path) -> None:
    """The images that the manifest names, then, once all of them were found sound as they lie
    there, the manifest. Raises ImageError."""
    images = {
        task.image_name: archive.stored_image(manifest, task)
        for task in manifest.tasks
        if task.externalized
    }
    for name, stream in archive.image_streams(images):
        _write(part / name, stream, images[name].size)
    for name, image in images.items():
        _require_sound(part / name, image)
    with open_new(part / MANIFEST_NAME) as file:
        file.write(archive.read(MANIFEST_NAME) or b"")
        sync(file)
    sync_directory(part)


def _require_sound(path: Path, image: StoredImage) -> None:
    """What it has in earlier checkpoints is not looked for: a restore checks what it needs."""
    with path.open("rb") as file:
        for _ in checked(own_chunks(image, FileStream(file, str(path))), 0):
            pass


def _write(path: Path, stream: ByteStream, size: int) -> None:
    with open_new(path) as file:
        while size:
            piece = stream.read(min(size, _CHUNK))
            file.write(piece)
            size -= len(piece)
        sync(file)
