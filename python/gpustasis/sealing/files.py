# SPDX-License-Identifier: Apache-2.0
"""A sealed checkpoint, looked into with its key: nothing of it is written anywhere."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from gpustasis._core import (
    MANIFEST_NAME,
    DataKey,
    ImageReader,
    Manifest,
    ManifestTask,
    Region,
    Source,
    is_sealed_name,
    parse_manifest,
)
from gpustasis.criu.images import INVENTORY_NAME, inventory_plugins
from gpustasis.errors import ImageError, SealError, UnsupportedError
from gpustasis.files import open_regular
from gpustasis.image.checkpoint import (
    NO_PARENT,
    READ_LIMIT,
    FoundSource,
    State,
    find_manifest,
    image_errors,
    is_image_name,
    is_sealed,
    plain_size,
    require_meant,
)
from gpustasis.image.pack import is_read_early
from gpustasis.image.verification import (
    OnProgress,
    require_all_listed,
    require_no_manifest,
)
from gpustasis.sealing.directory import open_key, open_sealed, read_file, seal_errors
from gpustasis.sealing.keys import KeyFile, KeySource, Remembered


class SealedFiles:
    """CheckpointFiles of a directory whose files are sealed; what lies in the clear beside them is
    read where it is.

    Raises SealError, UnsupportedError.
    """

    def __init__(self, directory: Path, key: DataKey) -> None:
        self.directory = directory
        self._key = key
        self._sealed = open_sealed(directory, key)
        self._sizes = {entry.name: entry.size for entry in self._sealed.entries}

    @property
    def name(self) -> str:
        """See CheckpointFiles; so for all that follow."""
        return str(self.directory)

    @property
    def names(self) -> list[str]:
        """Of what is sealed."""
        return list(self._sizes)

    def manifest(self) -> Manifest | None:
        if MANIFEST_NAME not in self._sizes:
            return None
        with image_errors((MANIFEST_NAME, self.place(MANIFEST_NAME))):
            return parse_manifest(self.read_sealed(MANIFEST_NAME), MANIFEST_NAME)

    def open_image(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        place = self.place(task.image_name)
        if task.image_name not in self._sizes:
            raise ImageError(f"{place}: missing: no sealed file holds it")
        with image_errors((task.image_name, place)):
            image = ImageReader.find_sealed(self.directory, task.image_name, self._key)
        require_meant(image, manifest, task, place)
        if image.info.sources:
            raise UnsupportedError(f"{place}: has chunks in other images, which is not sealed so")
        return image

    def read(self, name: str) -> bytes | None:
        if name in self._sizes:
            return self.read_sealed(name)
        try:
            with open_regular(self.directory / name, os.O_NOFOLLOW) as file:
                raw = file.read(READ_LIMIT + 1)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ImageError(f"cannot read {self.place(name)}: {exc.strerror}") from exc
        if len(raw) > READ_LIMIT:
            raise ImageError(f"{self.place(name)}: is longer than {READ_LIMIT} bytes")
        return raw

    def read_sealed(self, name: str) -> bytes:
        """A file that is sealed. Raises SealError."""
        with seal_errors(self.directory):
            return self._sealed.read(name)

    def check(self, elsewhere: list[str], threads: int, tell: Callable[[int], object]) -> None:
        """That every frame is authentic, but of these. Raises SealError."""
        with seal_errors(self.directory):
            self._sealed.check(elsewhere, threads, tell)

    def place(self, name: str) -> str:
        return str(self.directory / name)

    def sizes(self) -> dict[str, int]:
        with image_errors():
            clear = [path for path in self.directory.iterdir() if not is_sealed_name(path.name)]
            return {path.name: path.lstat().st_size for path in clear} | self._sizes

    def dated_ns(self) -> int:
        return next((e.mtime_ns for e in self._sealed.entries if e.name == MANIFEST_NAME), 0)

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        return None, State.MISSING

    def find_sources(self, sources: list[Source]) -> tuple[FoundSource, ...]:
        return tuple(
            FoundSource(source=source, directory=None, state=State.MISSING) for source in sources
        )


def find_manifest_with(
    directory: Path, key: str | os.PathLike[str] | KeySource | None
) -> Manifest | None:
    """As find_manifest, of a sealed checkpoint too, which takes a key. Raises as that."""
    if not is_sealed(directory):
        return find_manifest(directory)
    if key is None:
        raise SealError(
            f"{directory} is sealed, and it must be known whether it holds GPU state: name its key "
            "with --key or --key-command"
        )
    source = KeyFile(Path(key)) if isinstance(key, str | os.PathLike) else key
    return SealedFiles(directory, open_key(directory, source)).manifest()


def manifest_opener(source: KeySource) -> Callable[[Path], Manifest | None]:
    """What reads the manifest of a sealed checkpoint; it raises as SealedFiles. The source is asked
    once for each key."""
    keys = Remembered(source)
    return lambda directory: SealedFiles(directory, open_key(directory, keys)).manifest()


def verify_sealed(files: SealedFiles, on_progress: OnProgress, threads: int = 0) -> None:
    """Check every byte: that all frames are authentic, the images as `verify` does, and that what
    lies in the clear is what was sealed. Raises ImageError, SealError, UnsupportedError for the
    first that is wrong."""
    _check_early(files)
    manifest = files.manifest()
    stored = [] if manifest is None else _check_images(files, manifest, on_progress, threads)
    if manifest is None:
        require_no_manifest(files.directory)
    else:
        plugins = inventory_plugins(files.directory)
        require_all_listed(plugins, stored, files.place(MANIFEST_NAME))
    images = [task.image_name for task, _ in stored if task.externalized]
    for name in files.names:
        if is_image_name(name) and name not in images:
            raise ImageError(f"{files.place(name)}: not named by the manifest")
    files.check(images, threads, lambda done: on_progress("", done, 0))


def _check_early(files: SealedFiles) -> None:
    """What CRIU reads before it asks a plugin lies in the clear, where all of CRIU's is sealed."""
    if INVENTORY_NAME not in files.names:
        return  # none of CRIU's is sealed
    with image_errors():
        beside = {name for name in os.listdir(files.directory) if is_read_early(name)}
    for name in sorted(beside | {name for name in files.names if is_read_early(name)}):
        same = name in beside and name in files.names
        if same:
            clear = read_file(files.directory / name, READ_LIMIT)
            same = clear == files.read_sealed(name)
        if not same:
            raise SealError(f"{files.place(name)} is not the one that was sealed")


def _check_images(
    files: SealedFiles, manifest: Manifest, on_progress: OnProgress, threads: int
) -> list[tuple[ManifestTask, list[Region]]]:
    """Every task, with the regions of its image."""
    if manifest.pack is not None or manifest.parent_id != NO_PARENT:
        raise UnsupportedError(
            f"{files.name}: was packed, or built on an earlier checkpoint, before it was sealed: "
            "unseal it, and restore that"
        )
    stored: list[tuple[ManifestTask, list[Region]]] = []
    for task in manifest.tasks:
        if not task.externalized:
            stored.append((task, []))
            continue
        image = files.open_image(manifest, task)
        total = plain_size(image)

        def tell(done: int, name: str = task.image_name, total: int = total) -> None:
            on_progress(name, done, total)

        with image_errors((task.image_name, files.place(task.image_name))):
            image.verify(threads, tell)
        stored.append((task, image.info.regions))
    return stored
