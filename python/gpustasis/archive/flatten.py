# SPDX-License-Identifier: Apache-2.0
"""Write the image directory of an archive, so that it needs neither the archive nor its parents.

One pass over the archive, one over each parent, and one more over the archive for what its tasks
have alike, which each image of the copy has for itself; nothing but the directory is written, and
it appears when it is whole, as in gpustasis.image.flatten.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    PACK_NAME,
    PARENT_LINK,
    Encoding,
    FlatImageWriter,
    Manifest,
    ManifestTask,
    write_manifest,
)
from gpustasis.archive.chunks import StoredImage, checked, own_chunks
from gpustasis.archive.layout import CHECKPOINT
from gpustasis.archive.opened import Archive, member_image
from gpustasis.archive.tar import Kind, Member, TarReader
from gpustasis.archive.verification import Wanted, collect, other_chunks
from gpustasis.criu.images import INVENTORY_NAME, count_parent_pages, is_pagemap
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.errors import ArchiveError, CheckpointError, ImageError
from gpustasis.files import open_new, sync, sync_directory
from gpustasis.image.checkpoint import image_errors
from gpustasis.image.directory import new_directory, require_free
from gpustasis.image.flatten import Flattened, OnFile, without_parent

_NAME_LIMIT = 255  # bytes, limits.h NAME_MAX
_WHOLE_LIMIT = 64 << 20  # bytes of a file that is looked at before it is written
_PIECE = 1 << 20


def flatten_archive(
    archive: Archive, out: Path, on_file: OnFile | None = None, *, threads: int = 0
) -> Flattened:
    """Write CRIU's image directory out of the archive, with all that it has in the parents that
    were named when it was opened, to `out`, which must not exist, or be an empty directory.

    threads: that check chunks; 0: one for each processor. The rest of the archive (configuration,
    changes of the root file system) is left out.

    Raises ImageError, CheckpointError as gpustasis.image.flatten.flatten.
    """
    require_free(out)
    manifest = archive.manifest()
    if manifest is None:
        raise ImageError(f"{archive.name}: no manifest: it holds nothing that gpustasis saved")
    images = {
        task.image_name: archive.stored_image(manifest, task)
        for task in manifest.tasks
        if task.externalized
    }
    if (pack := archive.stored_pack(manifest)) is not None:
        images[PACK_NAME] = pack
    wanted: Wanted = {}
    for image in images.values():
        collect(archive, image, wanted)
    _require_plain_files(archive)
    _require_space(archive, out)
    with new_directory(out) as place:
        copy = _Copy(archive, manifest, images, place, on_file or (lambda name: None))
        return copy.run(wanted, threads)


class _Copy:
    """One flatten: what it reads and where it writes."""

    def __init__(
        self,
        archive: Archive,
        manifest: Manifest,
        images: dict[str, StoredImage],
        place: Path,
        tell: OnFile,
    ) -> None:
        self._archive = archive
        self._manifest = manifest
        self._images = images
        self._place = place
        self._tell = tell
        self._inventory: tuple[Member, bytes] | None = None
        self._other_bytes = 0

    def run(self, wanted: Wanted, threads: int) -> Flattened:
        with ExitStack() as stack:
            flat = {
                image: stack.enter_context(FlatImageWriter(image.reader, self._place / name))
                for name, image in self._images.items()
            }
            self._read_archive(flat, threads)
            for chunk in other_chunks(wanted, threads):
                flat[chunk.image].put(chunk.number, chunk.stored)
            written = {name: flat[image].finish() for name, image in self._images.items()}
        tasks = [
            ManifestTask(
                pid=task.pid,
                externalized=task.externalized,
                digest=written[task.image_name].digest if task.externalized else task.digest,
                state_before=task.state_before,
                gpu_source=task.gpu_source,
                gpus=task.gpus,
                kind=task.kind,
            )
            for task in self._manifest.tasks
        ]
        packed = written.pop(PACK_NAME, None)
        self._finish(tasks, None if packed is None else packed.digest)
        self._other_bytes += 0 if packed is None else packed.file_size
        return Flattened(
            images=len(written),
            image_bytes=sum(image.file_size for image in written.values()),
            earlier_bytes=sum(image.reader.totals.ref.plain for image in self._images.values()),
            other_bytes=self._other_bytes,
        )

    def _read_archive(self, flat: dict[StoredImage, FlatImageWriter], threads: int) -> None:
        for member, reader in self._archive.again():
            name = member.name.removeprefix(CHECKPOINT)
            if not _is_copied(member):
                continue
            image = member_image(member)
            if image is not None:
                self._read_image(image, reader, flat, threads)
            elif name == INVENTORY_NAME:
                self._inventory = member, self._read_whole(member, reader)
            elif name != MANIFEST_NAME:
                self._tell(name)
                self._copy(name, member, reader)

    def _read_image(
        self, name: str, reader: TarReader, flat: dict[StoredImage, FlatImageWriter], threads: int
    ) -> None:
        """What does not belong to the checkpoint is left out."""
        image = self._images.get(name)
        if image is None:
            return
        self._tell(name)
        for chunk in checked(own_chunks(image, reader), threads):
            if chunk.info.encoding != Encoding.ZERO:
                flat[image].put(chunk.number, chunk.stored)

    def _copy(self, name: str, member: Member, reader: TarReader) -> None:
        if is_pagemap(name):
            content = self._read_whole(member, reader)
            count = count_parent_pages(content, self._archive.place(name))
            if count:
                raise CheckpointError(
                    f"{self._archive.place(name)}: {count} pages of CPU memory are not in it but "
                    "in an earlier dump; a dump made with --prev-images-dir cannot be flattened"
                )
            self._write(name, member, [content])
        else:
            self._write(name, member, _pieces(member, reader))

    def _read_whole(self, member: Member, reader: TarReader) -> bytes:
        if member.size > _WHOLE_LIMIT:
            raise ArchiveError(
                f"{self._archive.name}: {member.name!r} has {member.size} bytes; "
                f"{_WHOLE_LIMIT} are the limit"
            )
        return reader.read(member.size)

    def _write(self, name: str, member: Member, pieces: Iterable[bytes]) -> None:
        with open_new(self._place / name) as file:
            for piece in pieces:
                self._other_bytes += file.write(piece)
            file.flush()  # a write would change the time again
            os.fchmod(file.fileno(), member.mode & 0o777)
            os.utime(file.fileno(), ns=(member.mtime_ns, member.mtime_ns))
            sync(file)

    def _finish(self, tasks: list[ManifestTask], pack: bytes | None) -> None:
        """Manifest, inventory and times."""
        dated = self._archive.dated_ns()
        with image_errors():
            write_manifest(self._place, without_parent(self._manifest, tasks, pack))
        os.utime(self._place / MANIFEST_NAME, ns=(dated, dated))
        sync_directory(self._place)
        if self._inventory is not None:
            member, content = self._inventory
            self._write(INVENTORY_NAME, member, [content])


def _is_copied(member: Member) -> bool:
    """Files of the image directory, but for what a writer left half-done."""
    name = member.name.removeprefix(CHECKPOINT)
    if member.kind is not Kind.FILE or name == member.name:
        return False
    return not (name.startswith(".") and name.endswith(".part"))


def _require_plain_files(archive: Archive) -> None:
    """Nothing else lies in the image directory. The two links to earlier checkpoints have no
    business in the copy."""
    for member in archive.members.values():
        name = member.name.removeprefix(CHECKPOINT)
        if name == member.name:
            continue
        if member.kind is Kind.SYMLINK and name in (PARENT_LINK, CRIU_PARENT_LINK):
            continue
        if member.kind is not Kind.FILE:
            raise ArchiveError(
                f"{archive.name}: {member.name!r} is a {member.kind.value}, and only ordinary "
                "files are written"
            )
        if "/" in name or len(os.fsencode(name)) > _NAME_LIMIT:
            raise ArchiveError(f"{archive.name}: {member.name!r} is no name for an image")


def _pieces(member: Member, reader: TarReader) -> Iterator[bytes]:
    for begin in range(0, member.size, _PIECE):
        yield reader.read(min(_PIECE, member.size - begin))


def _require_space(archive: Archive, out: Path) -> None:
    """Before gigabytes are written in vain: what the archive alone needs."""
    needed = sum(archive.sizes().values())
    found = os.statvfs(out.absolute().parent)
    free = found.f_bavail * found.f_frsize
    if needed > free:
        raise CheckpointError(f"{out}: {needed} bytes are needed there, and {free} are free")
