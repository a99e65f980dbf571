# SPDX-License-Identifier: Apache-2.0
"""A checkpoint archive, opened: a first pass notes what is in it, later ones read it again.

Only files that are small by nature are kept, and of images all but the chunk data; nothing is
unpacked to a disk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    PACK_NAME,
    SEALED_NAME,
    ImageReader,
    Manifest,
    ManifestTask,
    Source,
    parse_manifest,
)
from gpustasis.archive.chunks import (
    DirectoryParent,
    Parent,
    Parents,
    StoredImage,
    read_image,
    read_long_image,
)
from gpustasis.archive.layout import (
    CHECKPOINT,
    ROOTFS_DIFF,
    VOLUMES,
    ContainerFacts,
    crio_mounts,
    is_small,
    read_facts,
    require_container,
)
from gpustasis.archive.stream import (
    DEFAULT_LIMITS,
    ByteStream,
    Compression,
    Limits,
    UnpackedStream,
    detect,
)
from gpustasis.archive.tar import Kind, Member, TarReader
from gpustasis.errors import ArchiveError, CheckpointError, ImageError, UnsupportedError
from gpustasis.image.archive_view import ArchiveView
from gpustasis.image.checkpoint import (
    MAX_DEPTH,
    DirectoryFiles,
    FoundSource,
    State,
    chain_directories,
    image_errors,
    is_image_name,
    require_meant,
    require_pack,
    sealed_error,
)
from gpustasis.image.directory import is_there, shared
from gpustasis.image.inspection import Inspection, inspect_files
from gpustasis.image.store import read_store


class Archive:
    """One archive. Make it with open_archive. Implements
    gpustasis.image.checkpoint.CheckpointFiles, and gpustasis.archive.chunks.Parent.

    members: by name. images: by name. damaged_images: those that could not be opened, and why.
    file_bytes, unpacked_bytes: of all.
    """

    def __init__(self, path: Path, fd: int, limits: Limits, parents: Parents) -> None:
        self.path = path
        self.name = str(path)
        self.members: dict[str, Member] = {}
        self.images: dict[str, StoredImage] = {}
        self.damaged_images: dict[str, ImageError | UnsupportedError] = {}
        self.unpacked_bytes = 0
        self.file_bytes = os.fstat(fd).st_size
        self.compression = Compression.NONE
        self.parents = parents
        self._fd = fd
        self._limits = limits
        self._small: dict[str, bytes] = {}
        self._small_bytes = self._index_bytes = 0

    def walk(self) -> Iterator[tuple[Member, TarReader]]:
        """Each member, and the reader that gives its content. Raises ArchiveError."""
        with open(f"/proc/self/fd/{self._fd}", "rb") as file:  # with an offset of its own
            self.compression = detect(file, self.name)
            stream = UnpackedStream(file, self.compression, self._limits, self.name)
            reader = TarReader(stream, self._limits)
            for member in reader:
                yield member, reader
            self.unpacked_bytes = stream.position

    def again(self) -> Iterator[tuple[Member, TarReader]]:
        """As walk, on a later pass. Raises ArchiveError if the archive is not what it was."""
        seen = 0
        for member, reader in self.walk():
            seen += 1
            if self.members.get(member.name) != member:
                raise ArchiveError(f"{self.name}: was changed while it was read: {member.name!r}")
            yield member, reader
        if seen < len(self.members):
            raise ArchiveError(f"{self.name}: was changed while it was read: it ends earlier")

    def image_streams(self, names: Collection[str]) -> Iterator[tuple[str, ByteStream]]:
        """The images of these names, each from its beginning. Raises as again."""
        for member, reader in self.again():
            name = member_image(member)
            if name is not None and name in names:
                yield name, reader

    def checkpoint_id(self) -> bytes | None:
        """Of its manifest; None: it has none."""
        manifest = self.manifest()
        return None if manifest is None else manifest.checkpoint_id

    def holds(self, source: Source) -> bool:
        """Whether the image that is meant is in it, told by size and digest."""
        image = self.images.get(source.image_name)
        return image is not None and (image.size, image.reader.digest) == (
            source.file_size,
            source.digest,
        )

    def crio_mounts(self) -> list[str]:
        """As archive.layout.crio_mounts."""
        return crio_mounts(self._small, self.name)

    @property
    def sealed(self) -> bool:
        """Whether its checkpoint is."""
        return CHECKPOINT + SEALED_NAME in self.members

    def facts(self) -> ContainerFacts:
        """What it says of its container. Raises ArchiveError."""
        return read_facts(self._small, self.members.keys(), self.name)

    def small(self, name: str) -> bytes | None:
        """A member that is_small(); None: it is not there."""
        return self._small.get(name)

    def manifest(self) -> Manifest | None:
        raw = self.read(MANIFEST_NAME)
        if raw is None:
            return None
        with image_errors():
            return parse_manifest(raw, self.place(MANIFEST_NAME))

    def open_image(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        """See CheckpointFiles; its chunks cannot be read through it."""
        return self.stored_image(manifest, task).reader

    def stored_image(self, manifest: Manifest, task: ManifestTask) -> StoredImage:
        """The image of `task`, found to be the one that the manifest means. Raises ImageError,
        UnsupportedError if there is none, or it is damaged."""
        if task.image_name in self.damaged_images:
            raise self.damaged_images[task.image_name]
        image = self.images.get(task.image_name)
        if image is None:
            self.read(task.image_name)
            raise ImageError(f"{self.place(task.image_name)}: is not in the archive")
        require_meant(image.reader, manifest, task, image.place)
        return image

    def stored_pack(self, manifest: Manifest) -> StoredImage | None:
        """The pack that the manifest means; None: it means none. Raises as stored_image."""
        if PACK_NAME in self.damaged_images:
            raise self.damaged_images[PACK_NAME]
        pack = self.images.get(PACK_NAME)
        if (pack is None) != (manifest.pack is None):
            state = "not named by the manifest" if manifest.pack is None else "not in the archive"
            raise ImageError(f"{self.place(PACK_NAME)}: is {state}")
        if pack is not None:
            require_pack(pack.reader, manifest, pack.place)
        return pack

    def read(self, name: str) -> bytes | None:
        """Raises ArchiveError if there is something else of that name."""
        member = self.members.get(CHECKPOINT + name)
        if member is not None and member.kind is not Kind.FILE:
            raise ArchiveError(f"{self.place(name)}: is a {member.kind.value}, no file")
        return self._small.get(CHECKPOINT + name)

    def place(self, name: str) -> str:
        return f"{self.name}: {CHECKPOINT}{name}"

    def sizes(self) -> dict[str, int]:
        return {
            name.removeprefix(CHECKPOINT): member.size
            for name, member in self.members.items()
            if name.startswith(CHECKPOINT) and member.kind is Kind.FILE
        }

    def dated_ns(self) -> int:
        return self.members[CHECKPOINT + MANIFEST_NAME].mtime_ns

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        return self.parents.find_parent(manifest)

    def find_sources(self, sources: list[Source]) -> tuple[FoundSource, ...]:
        return tuple(self._find_source(source) for source in sources)

    def holder(self, source: Source) -> Parent | None:
        """What holds that image: the archive itself, or a parent that was named."""
        if source.depth:
            return self.parents.find(source)
        return self if self.holds(source) else None

    def _find_source(self, source: Source) -> FoundSource:
        if source.depth:
            return self.parents.find_source(source)
        found = self.images.get(source.image_name)
        absent = State.MISSING if found is None else State.REPLACED
        state = State.RIGHT if self.holds(source) else absent
        return FoundSource(source=source, directory=self.path, state=state)

    def survey(self) -> None:
        """The first pass, and a second one if an index is too long for the first."""
        long_tails: dict[str, int] = {}
        for member, reader in self.walk():
            self.members[member.name] = member
            name = member_image(member)
            if name is not None:
                self._note_image(name, member, reader, long_tails)
            elif member.kind is Kind.FILE and is_small(member.name):
                self._small[member.name] = self._read_small(member, reader)
        require_container(self.members.keys(), self.name)
        if not long_tails:
            return
        for member, reader in self.again():
            name = member_image(member)
            if name is not None and name in long_tails:
                self._keep(name, reader, member.size, long_tails[name])

    def _note_image(
        self, name: str, member: Member, reader: TarReader, long_tails: dict[str, int]
    ) -> None:
        if len(self.images) + len(self.damaged_images) + len(long_tails) >= self._limits.images:
            raise ArchiveError(f"{self.name}: has more than {self._limits.images} images")
        length = self._keep(name, reader, member.size)
        if length:
            long_tails[name] = length
            self._index_bytes += length

    def _keep(self, name: str, reader: TarReader, size: int, length: int = 0) -> int:
        """Open an image. length: of its metadata and index, where they are known to be long; where
        they turn out to be, that is returned, else 0."""
        place = self.place(name)
        left = self._limits.index_bytes - self._index_bytes
        try:
            if length:
                found: StoredImage | int = read_long_image(reader, size, length, place)
            else:
                found = read_image(reader, size, left, place)
        except ArchiveError:
            raise
        except (ImageError, UnsupportedError) as exc:
            self.damaged_images[name] = exc
            return 0
        if isinstance(found, int):
            return found
        self.images[name] = found
        if not length:
            self._index_bytes += size - found.tail_offset
        return 0

    def _read_small(self, member: Member, reader: TarReader) -> bytes:
        limits = self._limits
        if member.size > limits.kept_file_bytes:
            raise ArchiveError(
                f"{self.name}: {member.name} has {member.size} bytes; "
                f"{limits.kept_file_bytes} are the limit"
            )
        self._small_bytes += member.size
        if self._small_bytes > limits.kept_bytes:
            raise ArchiveError(
                f"{self.name}: the images of its processes have more than {limits.kept_bytes} bytes"
            )
        return reader.read(member.size)


@contextmanager
def open_archive(
    path: Path,
    parents: Parents | None = None,
    limits: Limits = DEFAULT_LIMITS,
    *,
    closed: bool = False,
) -> Iterator[Archive]:
    """Open and survey the archive at `path`; parents: where to look for earlier checkpoints.
    closed: also one whose checkpoint is sealed: only its container can be looked at.

    Raises ArchiveError if it is none, is damaged, or asks for more than the limits; SealError.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise ArchiveError(f"cannot open {path}: {exc.strerror}") from exc
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ArchiveError(f"{path}: is neither a directory nor an ordinary file")
        archive = Archive(path, fd, limits, parents or Parents())
        archive.survey()
        if archive.sealed and not closed:
            raise sealed_error(archive.name)
        yield archive
    finally:
        os.close(fd)


@contextmanager
def open_files(
    path: Path, parents: Sequence[Path] = (), limits: Limits = DEFAULT_LIMITS
) -> Iterator[DirectoryFiles | Archive]:
    """The checkpoint at `path`, told by what it is: a directory, else an archive.

    parents: directories and archives that hold earlier checkpoints of an archive's chain; of a
    directory, all that the links from it lead to are looked through too, and of a store all its
    checkpoints.

    Raises ArchiveError, ImageError; CheckpointError if parents are named for a directory, or a
    parent is a directory that holds no checkpoint.
    """
    if path.is_dir():
        if parents:
            raise CheckpointError(
                f"{path} is a directory: its link says where its parent {parents[0]} has to be"
            )
        yield DirectoryFiles(path)
        return
    with ExitStack() as stack:
        named: list[Parent] = []
        for parent in parents:
            if parent.is_dir():
                directories = _parent_directories(parent)
                stack.enter_context(shared(dict.fromkeys(directories)))
                named += [DirectoryParent(directory) for directory in directories]
            else:
                named.append(stack.enter_context(open_archive(parent, limits=limits)))
        yield stack.enter_context(open_archive(path, Parents(named), limits))


def _parent_directories(parent: Path) -> list[Path]:
    heads = [parent]
    if not is_there(parent / MANIFEST_NAME):
        entries = read_store(parent).values()
        heads = [one.directory for one in entries if one.manifest is not None]
        if not heads:
            raise CheckpointError(f"{parent} is no checkpoint of gpustasis's, and no store of any")
    chains = (chain_directories(head, MAX_DEPTH) for head in heads)
    return list(dict.fromkeys(directory for chain in chains for directory in chain))


def inspect_archive(archive: Archive) -> Inspection:
    """Look into it without checking memory: what is in its checkpoint, as of a directory, and
    what it says of the container. Raises as inspect_files."""
    rootfs_diff = archive.members.get(ROOTFS_DIFF)
    view = ArchiveView(
        **asdict(archive.facts()),
        compression=archive.compression,
        members=len(archive.members),
        file_bytes=archive.file_bytes,
        unpacked_bytes=archive.unpacked_bytes,
        checkpoint_bytes=_size_below(archive, CHECKPOINT),
        rootfs_diff_bytes=0 if rootfs_diff is None else rootfs_diff.size,
        volumes_bytes=_size_below(archive, VOLUMES),
    )
    return replace(inspect_files(archive), archive=view)


def member_image(member: Member) -> str | None:
    """The name of the image that a member is; None: it is none."""
    if member.kind is not Kind.FILE or not member.name.startswith(CHECKPOINT):
        return None
    name = member.name.removeprefix(CHECKPOINT)
    return name if is_image_name(name) or name == PACK_NAME else None


def _size_below(archive: Archive, prefix: str) -> int:
    return sum(m.size for m in archive.members.values() if m.name.startswith(prefix))
