# SPDX-License-Identifier: Apache-2.0
"""Copy a checkpoint so that the copy needs no other. Each image of it holds all of its own memory,
also what its tasks have alike.

The copy is built beside its place under a hidden name, its inventory last, synced and renamed:
killed at any moment, it leaves nothing at that place, and under the hidden name nothing that CRIU
would restore before it is whole. A second run begins anew.
"""

from __future__ import annotations

import errno
import os
import shutil
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    PACK_NAME,
    PARENT_LINK,
    SIGNATURE_NAME,
    STATEMENT_NAME,
    Manifest,
    ManifestTask,
    PackReader,
    flatten_image,
    write_manifest,
)
from gpustasis.criu.images import INVENTORY_NAME, parent_pages
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.errors import CheckpointError, ImageError
from gpustasis.files import open_new, open_regular, sync, sync_directory
from gpustasis.image.arena import require_durable
from gpustasis.image.checkpoint import (
    chain_directories,
    find_manifest,
    image_errors,
    image_names,
    open_image,
    open_pack,
)
from gpustasis.image.directory import new_directory, require_free, shared
from gpustasis.image.pack import is_read_early, unpack, unpack_inventory, verify_pack

_COPY_SIZE = 64 << 20  # bytes asked for at once
_NOT_BETWEEN_THESE = (errno.EXDEV, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)

# Told the name of each file before it is written.
OnFile = Callable[[str], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Flattened:
    """images: how many were written; image_bytes: of these files; earlier_bytes: memory that the
    checkpoint had in earlier ones; other_bytes: of the files copied as they are."""

    images: int
    image_bytes: int
    earlier_bytes: int
    other_bytes: int


def flatten(
    directory: Path,
    out: Path,
    on_file: OnFile | None = None,
    *,
    threads: int = 0,
    unpacked: bool = False,
) -> Flattened:
    """Write a self-contained copy of the checkpoint in `directory` to `out`, which must not exist,
    or be an empty directory. The copy has the same checkpoint_id and times.

    threads: that read and check chunks; 0: one for each processor. unpacked: CRIU's images are as
    CRIU wrote them, also where they are packed.

    Raises ImageError if the checkpoint or its chain is damaged or has gaps, CheckpointError if
    CRIU's own images need those of an earlier dump, or `out` is no place for it.
    """
    tell = on_file or (lambda name: None)
    require_free(out)
    require_durable(directory, "copy it")
    chain = chain_directories(directory, _chain_length(directory))
    with shared(dict.fromkeys(chain)):
        manifest = _manifest(directory)
        _require_own_pages(directory)
        names = _files_to_copy(directory, manifest)
        pack = open_pack(directory, manifest)
        if not unpacked:
            pack = None
        with new_directory(out) as place:
            return _write(directory, manifest, names, place, tell, threads, pack)


def _write(
    directory: Path,
    manifest: Manifest,
    names: list[str],
    place: Path,
    tell: OnFile,
    threads: int,
    pack: PackReader | None,
) -> Flattened:
    """pack: to be unpacked."""
    if pack is not None:
        names = [name for name in names if name != PACK_NAME and not is_read_early(name)]
    tasks, image_bytes, earlier_bytes = [], 0, 0
    for task in manifest.tasks:
        if not task.externalized:
            tasks.append(task)
            continue
        tell(task.image_name)
        image = open_image(directory, manifest, task)
        with image_errors():
            image.attach_sources()
            written = flatten_image(image, place / task.image_name, threads)
        image_bytes += written.file_size
        earlier_bytes += image.totals.ref.plain
        tasks.append(flat_task(task, written.digest))
    other_bytes = 0
    for name in names:
        tell(name)
        if name != INVENTORY_NAME:
            other_bytes += _copy(directory / name, place / name)
    if pack is not None:
        tell(PACK_NAME)
        other_bytes += unpack(pack, place, threads)
    copied = without_parent(manifest, tasks, manifest.pack if pack is None else None)
    with image_errors():
        write_manifest(place, copied)
    shutil.copystat(directory / MANIFEST_NAME, place / MANIFEST_NAME)
    sync_directory(place)
    if INVENTORY_NAME in names:
        half = place / f".{INVENTORY_NAME}"  # cut short, it would look like a checkpoint's
        other_bytes += _copy(directory / INVENTORY_NAME, half)
        half.rename(place / INVENTORY_NAME)
    if pack is not None:
        other_bytes += unpack_inventory(pack, place)
    verify_pack(place, copied, threads)
    found = directory.stat()  # its mode is not copied: the copy is its owner's alone
    os.utime(place, ns=(found.st_atime_ns, found.st_mtime_ns))
    return Flattened(
        images=sum(task.externalized for task in tasks),
        image_bytes=image_bytes,
        earlier_bytes=earlier_bytes,
        other_bytes=other_bytes,
    )


def flat_task(task: ManifestTask, digest: bytes) -> ManifestTask:
    """The task, whose image is another file now."""
    return ManifestTask(
        pid=task.pid,
        externalized=True,
        digest=digest,
        state_before=task.state_before,
        gpu_source=task.gpu_source,
        gpus=task.gpus,
        kind=task.kind,
    )


def without_parent(manifest: Manifest, tasks: list[ManifestTask], pack: bytes | None) -> Manifest:
    """The manifest of a checkpoint that needs no other. pack: its digest, if there is one."""
    return Manifest(
        checkpoint_id=manifest.checkpoint_id,
        driver_api_version=manifest.driver_api_version,
        driver_version=manifest.driver_version,
        gpus=manifest.gpus,
        requirements=manifest.requirements,
        tasks=tasks,
        pack=pack,
    )


def _chain_length(directory: Path) -> int:
    return _manifest(directory).chain_length


def _manifest(directory: Path) -> Manifest:
    manifest = find_manifest(directory)
    if manifest is None:
        raise ImageError(f"{directory}: no manifest: it holds nothing that gpustasis saved")
    return manifest


def _require_own_pages(directory: Path) -> None:
    for name, count in parent_pages(directory).items():
        link = directory / CRIU_PARENT_LINK
        target = os.path.realpath(link)
        raise CheckpointError(
            f"{directory / name}: {count} pages of CPU memory are not in it but in the earlier "
            f"images that {link} leads to ({target}); a dump made with --prev-images-dir "
            "cannot be flattened"
        )


def _files_to_copy(directory: Path, manifest: Manifest) -> list[str]:
    """Everything but our images, manifest and what a writer left half-done; the two links to
    earlier checkpoints have no business in the copy. Raises ImageError for what is no file."""
    ours = {MANIFEST_NAME, PARENT_LINK, CRIU_PARENT_LINK, *image_names(directory)}
    ours |= {STATEMENT_NAME, SIGNATURE_NAME}  # of other files than the copy will have
    names = []
    with os.scandir(directory) as items:
        for item in items:
            if item.name in ours or (item.name.startswith(".") and item.name.endswith(".part")):
                continue
            if not item.is_file(follow_symlinks=False):
                raise ImageError(f"{item.path} is no ordinary file, and only such are copied")
            names.append(item.name)
    return sorted(names)


def _copy(source: Path, target: Path) -> int:
    """Copy content, mode, owner and times, and sync; bytes copied."""
    with open_regular(source, os.O_NOFOLLOW) as read, open_new(target) as write:
        size = _copy_content(read.fileno(), write.fileno())
        found = os.fstat(read.fileno())
        os.fchown(write.fileno(), found.st_uid, found.st_gid)
        os.fchmod(write.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(write.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        sync(write)
    return size


def _copy_content(read: int, write: int) -> int:
    size = 0
    try:
        while count := os.copy_file_range(read, write, _COPY_SIZE):
            size += count
        if size > 0:
            return size
    except OSError as exc:
        if size > 0 or exc.errno not in _NOT_BETWEEN_THESE:
            raise
    while count := os.sendfile(
        write, read, None, _COPY_SIZE
    ):  # also for files that say they are empty
        size += count
    return size
