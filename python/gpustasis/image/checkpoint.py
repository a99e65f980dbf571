# SPDX-License-Identifier: Apache-2.0
"""A checkpoint's files: the manifest, the images that it names, and the chain of earlier
checkpoints below it; in a directory here, or in an archive elsewhere.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Protocol
from uuid import UUID

from gpustasis._core import (
    MANIFEST_NAME,
    PACK_NAME,
    PARENT_LINK,
    SEALED_NAME,
    CorruptDataError,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    PackReader,
    Source,
    UnsupportedDataError,
    read_manifest,
)
from gpustasis.errors import ImageError, SealError, UnsupportedError
from gpustasis.files import open_regular
from gpustasis.image.arena import stored_directory
from gpustasis.image.directory import is_directory, is_there

_PROCESS_TREE = "pstree.img"  # of CRIU's; in every checkpoint
_IMAGE_NAME = re.compile(r"gpustasis-(memory-)?[1-9][0-9]{0,9}\.img")

NO_PARENT = bytes(16)
MAX_DEPTH = 65535  # docs/format.md, "Limits"
STORE_ROOT = Path("/var/lib/gpustasis")  # src/core/lineage.hpp
_DIGEST_SIZE = 16  # bytes at the end of an image

READ_LIMIT = 64 << 20  # bytes of a small file


@contextmanager
def image_errors(rename: tuple[str, str] = ("", "")) -> Iterator[None]:
    """Turn what _core raises for a bad file into this package's exceptions.

    rename: a path that the messages name, and what they shall name instead.
    """
    try:
        yield
    except (CorruptDataError, OSError) as exc:
        raise ImageError(str(exc).replace(*rename)) from exc
    except UnsupportedDataError as exc:
        raise UnsupportedError(str(exc).replace(*rename)) from exc


def is_sealed(directory: Path) -> bool:
    """Whether the checkpoint there is sealed. Raises ImageError."""
    return is_there(directory / SEALED_NAME)


def require_restorable(directory: Path) -> None:
    """Raise SealError if CRIU's images there are sealed: CRIU cannot read them. Those of the
    plugin alone it opens itself, with the key that its configuration names."""
    if is_sealed(directory) and not is_there(directory / _PROCESS_TREE):
        raise sealed_error(str(directory))


def require_not_sealed(directory: Path) -> None:
    """Raise SealError, which says what to do, if the checkpoint there is sealed."""
    if is_sealed(directory):
        raise sealed_error(str(directory))


def sealed_error(place: str) -> SealError:
    """What to say of a sealed checkpoint where an open one is needed."""
    return SealError(
        f"{place} is sealed: its files are encrypted; open it with `gpustasis unseal DIR --key KEY "
        "-o OUT`"
    )


def find_manifest(directory: Path) -> Manifest | None:
    """The manifest of the checkpoint in `directory`, wherever it is stored; None if there is none.
    Raises ImageError, UnsupportedError, and SealError of a sealed checkpoint."""
    require_not_sealed(directory)
    place = stored_directory(directory)
    if not is_there(place / MANIFEST_NAME):
        return None
    with image_errors():
        return read_manifest(place)


def open_image(directory: Path, manifest: Manifest, task: ManifestTask) -> ImageReader:
    """The image of `task`, found to be the one the manifest means; its chunks are not read.

    Raises ImageError, UnsupportedError; each names the file.
    """
    path = stored_directory(directory) / task.image_name
    with image_errors():
        image = ImageReader.open(path)
    require_meant(image, manifest, task, str(path))
    return image


def require_meant(image: ImageReader, manifest: Manifest, task: ManifestTask, path: str) -> None:
    """Raise ImageError if `image`, which lies at `path`, is not what the manifest means."""
    if image.info.pid != task.pid:
        raise ImageError(f"{path}: is the image of pid {image.info.pid}")
    if image.info.kind != task.kind:
        raise ImageError(f"{path}: is an image of {image.info.kind.name} memory")
    if image.info.checkpoint_id != manifest.checkpoint_id:
        raise ImageError(f"{path}: belongs to another checkpoint")
    if image.digest != task.digest:
        raise ImageError(f"{path}: is not the image the manifest means: the digests differ")


def open_pack(directory: Path, manifest: Manifest) -> PackReader | None:
    """The pack of CRIU's images, found to be the one that the manifest means; None: they lie in the
    directory as CRIU wrote them. Raises ImageError, UnsupportedError; each names the file."""
    path = directory / PACK_NAME
    if manifest.pack is None:
        if is_there(path):
            raise ImageError(f"{path}: not named by the manifest")
        return None
    with image_errors((PACK_NAME, str(path))):
        pack = PackReader.open(directory)
    if (pack.checkpoint_id, pack.digest) != (manifest.checkpoint_id, manifest.pack):
        raise ImageError(f"{path}: is not the pack that the manifest means")
    return pack


def require_pack(image: ImageReader, manifest: Manifest, path: str) -> None:
    """Raise ImageError if the pack that lies at `path`, of which only the ends are at hand, is not
    the one that the manifest means."""
    if image.info.kind != MemoryKind.FILES:
        raise ImageError(f"{path}: is no pack")
    if (image.info.checkpoint_id, image.digest) != (manifest.checkpoint_id, manifest.pack):
        raise ImageError(f"{path}: is not the pack that the manifest means")


def plain_size(image: ImageReader) -> int:
    """Bytes of memory that an image holds."""
    return sum(region.length for region in image.info.regions)


def has_gpu_state(manifest: Manifest) -> bool:
    """Whether a process of the checkpoint used CUDA; else it holds CPU memory only."""
    return any(task.kind == MemoryKind.GPU for task in manifest.tasks)


def image_names(directory: Path) -> list[str]:
    """Names in `directory` that are those of images, sorted. Raises ImageError."""
    with image_errors():
        place = stored_directory(directory)
        return sorted(p.name for p in place.iterdir() if is_image_name(p.name))


def is_image_name(name: str) -> bool:
    """Whether it is the name of an image."""
    return _IMAGE_NAME.fullmatch(name) is not None


def gpu_uuid(raw: bytes) -> str:
    """As nvidia-smi prints it: "GPU-" and a UUID."""
    return f"GPU-{UUID(bytes=raw)}"


def whose(source: Source) -> str:
    """A source for messages: which file of which checkpoint it is."""
    text = f"{source.image_name} of checkpoint {source.checkpoint_id.hex()}"
    return f"{text}, {source.depth} before this one" if source.depth else f"{text}, this one"


class State(StrEnum):
    """What is found where an earlier checkpoint should be. OUTSIDE: nowhere to look for it."""

    RIGHT = "right"
    MISSING = "missing"
    REPLACED = "replaced"
    OUTSIDE = "outside"


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundSource:
    """A source of an image and what is there. directory: None if the links do not lead so far; of
    an archive that was named as a parent, the archive."""

    source: Source
    directory: Path | None
    state: State


def parent_directory(directory: Path) -> Path | None:
    """Where the link in `directory` leads, existing or not, without links; None: there is none.

    Raises ImageError.
    """
    link = stored_directory(directory) / PARENT_LINK
    try:
        os.readlink(link)
        return link.resolve()
    except FileNotFoundError:
        return None
    except (OSError, RuntimeError) as exc:  # RuntimeError: a loop, before Python 3.13
        raise ImageError(f"{link} is no link that can be followed: {exc}") from exc


def find_parent(directory: Path) -> Path | None:
    """Where the parent of the checkpoint in `directory` is: where its link leads; else where
    docs/format.md, "Links", says to look for its id; None if it is nowhere."""
    with suppress(ImageError):  # what the link leads to may still be where its id says
        linked = parent_directory(directory)
        if linked is not None and is_directory(linked):
            return linked
    try:
        manifest = find_manifest(directory)
    except (ImageError, UnsupportedError):
        return None
    if manifest is None or manifest.parent_id == NO_PARENT:
        return None
    return find_checkpoint(manifest.parent_id)


def find_checkpoint(checkpoint_id: bytes) -> Path | None:
    """A directory below STORE_ROOT with that checkpoint; through no link that has its id for a
    name: nor does the plugin."""
    name = checkpoint_id.hex()
    places = [STORE_ROOT / "checkpoints"]
    with suppress(OSError):  # there are none, or not for us
        places += sorted((STORE_ROOT / "containers").iterdir())
    for place in places:
        if os.path.islink(place / name):
            continue
        try:
            found = find_manifest(place / name)
        except (ImageError, UnsupportedError, OSError):
            continue
        if found is not None and found.checkpoint_id == checkpoint_id:
            return (place / name).resolve()
    return None


def chain_directories(directory: Path, depth: int) -> list[Path]:
    """Where `directory` is stored, and `depth` of those below it, as far as they are there."""
    found = [stored_directory(directory)]
    while len(found) <= depth:
        parent = find_parent(found[-1])
        if parent is None:
            break
        found.append(parent)
    return found


def parent_state(directory: Path, manifest: Manifest) -> State:
    """Whether what is found as the parent of `directory` is the one that `manifest` names."""
    try:
        parent = find_parent(directory)
        found = None if parent is None else find_manifest(parent)
        if parent is None:
            parent_directory(directory)  # what is there may be no link at all
    except (ImageError, UnsupportedError):
        return State.REPLACED
    if found is None:
        return State.MISSING
    return State.RIGHT if found.checkpoint_id == manifest.parent_id else State.REPLACED


def find_sources(directory: Path, sources: list[Source]) -> tuple[FoundSource, ...]:
    """What is there of each source of an image in `directory`: told by size and digest."""
    deepest = max((source.depth for source in sources), default=0)
    directories = chain_directories(directory, deepest)
    return tuple(_find(source, directories) for source in sources)


def _find(source: Source, directories: list[Path]) -> FoundSource:
    if source.depth >= len(directories):
        return FoundSource(source=source, directory=None, state=State.MISSING)
    directory = directories[source.depth]
    return FoundSource(
        source=source,
        directory=directory,
        state=_state(directory / source.image_name, source),
    )


def _state(path: Path, source: Source) -> State:
    try:
        with open_regular(path) as file:
            if file.seek(0, os.SEEK_END) != source.file_size:
                return State.REPLACED
            file.seek(source.file_size - _DIGEST_SIZE)
            return State.RIGHT if file.read() == source.digest else State.REPLACED
    except FileNotFoundError:
        return State.MISSING
    except OSError:
        return State.REPLACED


class CheckpointFiles(Protocol):
    """What a checkpoint consists of. Every method raises ImageError for what is damaged, and
    UnsupportedError for what is newer than this reader."""

    @property
    def name(self) -> str:
        """For people: the path."""

    def manifest(self) -> Manifest | None:
        """None: there is none."""

    def open_image(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        """The image of `task`, found to be the one that the manifest means. Whether its chunks can
        be read through it is not promised."""

    def read(self, name: str) -> bytes | None:
        """A small file of CRIU's or ours; None: there is none."""

    def place(self, name: str) -> str:
        """A file, for messages."""

    def sizes(self) -> dict[str, int]:
        """Bytes of every file by name."""

    def dated_ns(self) -> int:
        """When the manifest was written, since 1970."""

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        """Where the parent is, if that is known, and what is there."""

    def find_sources(self, sources: list[Source]) -> tuple[FoundSource, ...]:
        """Where the other images are that hold chunks of one of this checkpoint."""


class DirectoryFiles:
    """CheckpointFiles of an image directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._pack: PackReader | None = None

    @property
    def name(self) -> str:
        return str(self.directory)

    def manifest(self) -> Manifest | None:
        return find_manifest(self.directory)

    def open_image(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        return open_image(self.directory, manifest, task)

    def read(self, name: str) -> bytes | None:
        try:
            with open_regular(self.directory / name) as file:
                raw = file.read(READ_LIMIT + 1)
        except FileNotFoundError:
            return self._read_packed(name)
        except OSError as exc:
            raise ImageError(f"cannot read {self.place(name)}: {exc.strerror}") from exc
        if len(raw) > READ_LIMIT:
            raise ImageError(f"{self.place(name)}: is longer than {READ_LIMIT} bytes")
        return raw

    def _read_packed(self, name: str) -> bytes | None:
        if self._pack is None and (manifest := self.manifest()) is not None:
            self._pack = open_pack(self.directory, manifest)
        if self._pack is None:
            return None
        with image_errors(), suppress(KeyError):
            return self._pack.read(name)
        return None

    def place(self, name: str) -> str:
        return str(self.directory / name)

    def sizes(self) -> dict[str, int]:
        with image_errors():
            places = dict.fromkeys((self.directory, stored_directory(self.directory)))
            files = [path for place in places for path in place.iterdir() if os.path.isfile(path)]
            return {path.name: path.lstat().st_size for path in files}

    def dated_ns(self) -> int:
        with image_errors():
            return (stored_directory(self.directory) / MANIFEST_NAME).stat().st_mtime_ns

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        try:
            parent = find_parent(self.directory) or parent_directory(self.directory)
        except ImageError:  # no link; parent_state says so
            parent = None
        where = None if parent is None else str(parent)
        return where, parent_state(self.directory, manifest)

    def find_sources(self, sources: list[Source]) -> tuple[FoundSource, ...]:
        return find_sources(self.directory, sources)
