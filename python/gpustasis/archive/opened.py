"""A checkpoint archive, opened: a first pass notes what is in it, later ones read it again.

Only files that are small by nature are kept, and of images all but the chunk data; nothing is
unpacked to a disk.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    ImageReader,
    Manifest,
    ManifestTask,
    Source,
    image_name,
)
from gpustasis.archive.hollow_image import (
    HollowFile,
    HollowImage,
    read_ends,
    read_long_tail,
)
from gpustasis.archive.layout import (
    CHECKPOINT,
    ContainerFacts,
    is_small,
    read_facts,
    require_container,
)
from gpustasis.archive.manifest import parse_core_manifest
from gpustasis.archive.parents import Parents
from gpustasis.archive.stream import (
    DEFAULT_LIMITS,
    ByteStream,
    Compression,
    Limits,
    UnpackedStream,
    detect,
)
from gpustasis.archive.tar import Kind, Member, TarReader
from gpustasis.errors import ArchiveError, ImageError
from gpustasis.image.chain import FoundSource, State
from gpustasis.image.checkpoint import image_pid


class Archive:
    """One archive. Make it with open_archive. Implements gpustasis.image.files.CheckpointFiles.

    members: by name. image_files: by pid. file_bytes,
    unpacked_bytes: of all. damaged_files: those of image_files that are none at all, and why.
    """

    def __init__(self, path: Path, fd: int, limits: Limits, parents: Parents) -> None:
        self.path = path
        self.name = str(path)
        self.members: dict[str, Member] = {}
        self.image_files: dict[int, HollowFile] = {}
        self.damaged_files: dict[int, ImageError] = {}
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

    def images_again(self) -> Iterator[tuple[Member, TarReader, int]]:
        """The members that are images, on a later pass. Raises as again."""
        for member, reader in self.again():
            pid = _image_pid(member)
            if pid is not None:
                yield member, reader, pid

    def checkpoint_id(self) -> bytes | None:
        """As a parent: of its manifest; None: it has none."""
        manifest = self.manifest()
        return None if manifest is None else manifest.checkpoint_id

    def holds(self, source: Source) -> bool:
        """As a parent: whether the file that is meant is in it, told by size and digest."""
        file = self.image_files.get(source.pid)
        return file is not None and (file.size, file.digest) == (source.file_size, source.digest)

    def image_streams(self, pids: Collection[int]) -> Iterator[tuple[int, ByteStream]]:
        """As a parent: these images, each from its beginning."""
        for _, reader, pid in self.images_again():
            if pid in pids:
                yield pid, reader

    def facts(self) -> ContainerFacts:
        """What it says of its container. Raises ArchiveError."""
        return read_facts(self._small, self.members.keys(), self.name)

    def small(self, name: str) -> bytes | None:
        """A member that is_small(); None: it is not there."""
        return self._small.get(name)

    def manifest(self) -> Manifest | None:
        raw = self._regular(MANIFEST_NAME)
        return None if raw is None else parse_core_manifest(raw, self.place(MANIFEST_NAME))

    def open_image(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        """See CheckpointFiles; its chunks cannot be read through it."""
        return self.hollow_image(task.pid).open(manifest, task)

    def hollow_image(self, pid: int) -> HollowImage:
        """Raises ImageError if there is none, or it is damaged so that it was not kept."""
        if pid in self.damaged_files:
            raise self.damaged_files[pid]
        if pid not in self.image_files:
            self._regular(image_name(pid))
            raise ImageError(f"{self.place(image_name(pid))}: is not in the archive")
        return HollowImage(self.image_files[pid])

    def read(self, name: str) -> bytes | None:
        return self._regular(name)

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
        return tuple(self.parents.find_source(source) for source in sources)

    def _regular(self, name: str) -> bytes | None:
        """Raises ArchiveError if there is something else of that name."""
        member = self.members.get(CHECKPOINT + name)
        if member is not None and member.kind is not Kind.FILE:
            raise ArchiveError(f"{self.place(name)}: is a {member.kind.value}, no file")
        return self._small.get(CHECKPOINT + name)

    def _survey(self, kept: ExitStack) -> None:
        """The first pass, and a second one if an index is too long for the first."""
        long_tails: dict[int, int] = {}
        for member, reader in self.walk():
            self.members[member.name] = member
            pid = _image_pid(member)
            if pid is not None:
                self._note_image(pid, member, reader, kept, long_tails)
            elif member.kind is Kind.FILE and is_small(member.name):
                self._small[member.name] = self._read_small(member, reader)
        require_container(self.members.keys(), self.name)
        if not long_tails:
            return
        for member, reader, pid in self.images_again():
            if pid in long_tails:
                header, tail = read_long_tail(reader, member.size, long_tails[pid])
                self._keep(pid, member, header, tail, long_tails[pid], kept)

    def _note_image(
        self,
        pid: int,
        member: Member,
        reader: TarReader,
        kept: ExitStack,
        long_tails: dict[int, int],
    ) -> None:
        place = self.place(image_name(pid))
        if len(self.image_files) + len(long_tails) >= self._limits.image_files:
            raise ArchiveError(f"{self.name}: has more than {self._limits.image_files} images")
        left = self._limits.index_bytes - self._index_bytes
        try:
            found = read_ends(reader, member.size, left, place)
        except ArchiveError:
            raise
        except ImageError as exc:
            self.damaged_files[pid] = exc
            return
        if isinstance(found, int):
            long_tails[pid] = found
            self._index_bytes += found
        else:
            header, tail = found
            self._index_bytes += len(tail)
            self._keep(pid, member, header, [tail], len(tail), kept)

    def _keep(
        self,
        pid: int,
        member: Member,
        header: bytes,
        tail: Iterable[bytes],
        length: int,
        kept: ExitStack,
    ) -> None:
        place = self.place(image_name(pid))
        hollow = HollowFile(member.size, header, tail, length, place)
        kept.callback(hollow.close)
        self.image_files[pid] = hollow

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
    path: Path, parents: Parents | None = None, limits: Limits = DEFAULT_LIMITS
) -> Iterator[Archive]:
    """Open and survey the archive at `path`; parents: where to look for earlier checkpoints.

    Raises ArchiveError if it is none, is damaged, or asks for more than the limits.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
    except OSError as exc:
        raise ArchiveError(f"cannot open {path}: {exc.strerror}") from exc
    with ExitStack() as stack:
        stack.callback(os.close, fd)
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ArchiveError(f"{path}: is neither a directory nor an ordinary file")
        archive = Archive(path, fd, limits, parents or Parents())
        archive._survey(stack)
        yield archive


def _image_pid(member: Member) -> int | None:
    if member.kind is not Kind.FILE or not member.name.startswith(CHECKPOINT):
        return None
    return image_pid(member.name.removeprefix(CHECKPOINT))
