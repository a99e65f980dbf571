# SPDX-License-Identifier: Apache-2.0
"""The files of one checkpoint, wherever they are: in a directory here, in an archive elsewhere."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from gpustasis._core import MANIFEST_NAME, ImageReader, Manifest, ManifestTask, Source
from gpustasis.errors import ImageError
from gpustasis.image.chain import (
    FoundSource,
    State,
    find_parent,
    find_sources,
    parent_directory,
    parent_state,
)
from gpustasis.image.checkpoint import find_manifest, open_image

READ_LIMIT = 64 << 20  # bytes of a small file


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
        """Where the images are that hold chunks of this checkpoint."""


class DirectoryFiles:
    """CheckpointFiles of an image directory."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory

    @property
    def name(self) -> str:
        return str(self.directory)

    def manifest(self) -> Manifest | None:
        return find_manifest(self.directory)

    def open_image(self, manifest: Manifest, task: ManifestTask) -> ImageReader:
        return open_image(self.directory, manifest, task)

    def read(self, name: str) -> bytes | None:
        try:
            with (self.directory / name).open("rb") as file:
                raw = file.read(READ_LIMIT + 1)
        except FileNotFoundError:
            return None
        except OSError as exc:
            raise ImageError(f"cannot read {self.place(name)}: {exc.strerror}") from exc
        if len(raw) > READ_LIMIT:
            raise ImageError(f"{self.place(name)}: is longer than {READ_LIMIT} bytes")
        return raw

    def place(self, name: str) -> str:
        return str(self.directory / name)

    def sizes(self) -> dict[str, int]:
        return {p.name: p.lstat().st_size for p in self.directory.iterdir() if p.is_file()}

    def dated_ns(self) -> int:
        return (self.directory / MANIFEST_NAME).stat().st_mtime_ns

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        try:
            parent = find_parent(self.directory) or parent_directory(self.directory)
        except ImageError:  # no link; parent_state says so
            parent = None
        where = None if parent is None else str(parent)
        return where, parent_state(self.directory, manifest)

    def find_sources(self, sources: list[Source]) -> tuple[FoundSource, ...]:
        return find_sources(self.directory, sources)
