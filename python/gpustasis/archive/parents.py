# SPDX-License-Identifier: Apache-2.0
"""Where the chunks are that an archive's images have in earlier checkpoints: in directories and
archives that the user names. What is found there is known by its digest, not by its name."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Protocol

from gpustasis._core import Manifest, Source, image_name
from gpustasis.archive.stream import ByteStream, FileStream
from gpustasis.errors import ImageError, UnsupportedError
from gpustasis.image.chain import FoundSource, State
from gpustasis.image.checkpoint import find_manifest

_DIGEST_SIZE = 16  # bytes at the end of an image


class Parent(Protocol):
    """One earlier checkpoint. Errors as of CheckpointFiles."""

    @property
    def path(self) -> Path:
        """Of the directory or archive."""

    def checkpoint_id(self) -> bytes | None:
        """None: it has no manifest."""

    def holds(self, source: Source) -> bool:
        """Whether the image that is meant is in it, told by size and digest."""

    def image_streams(self, pids: Collection[int]) -> Iterator[tuple[int, ByteStream]]:
        """The images of these processes, each from its beginning."""


class Parents:
    """All that were named, in that order; an image that several hold is taken from the first."""

    def __init__(self, named: Sequence[Parent] = ()) -> None:
        self._named = tuple(named)

    def __bool__(self) -> bool:
        return bool(self._named)

    def find(self, source: Source) -> Parent | None:
        return next((parent for parent in self._named if parent.holds(source)), None)

    def find_parent(self, manifest: Manifest) -> tuple[str | None, State]:
        """See CheckpointFiles."""
        for parent in self._named:
            try:
                if parent.checkpoint_id() == manifest.parent_id:
                    return str(parent.path), State.RIGHT
            except (ImageError, UnsupportedError):
                continue  # then it is not the one; who reads it hears why
        return None, self._absent

    def find_source(self, source: Source) -> FoundSource:
        """See CheckpointFiles, of one."""
        parent = self.find(source)
        if parent is None:
            return FoundSource(source=source, directory=None, state=self._absent)
        return FoundSource(source=source, directory=parent.path, state=State.RIGHT)

    @property
    def _absent(self) -> State:
        return State.MISSING if self._named else State.OUTSIDE


class DirectoryParent:
    """A Parent that is an image directory."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def checkpoint_id(self) -> bytes | None:
        manifest = find_manifest(self.path)
        return None if manifest is None else manifest.checkpoint_id

    def holds(self, source: Source) -> bool:
        try:
            with (self.path / image_name(source.pid)).open("rb") as file:
                if file.seek(0, os.SEEK_END) != source.file_size:
                    return False
                file.seek(source.file_size - _DIGEST_SIZE)
                return file.read(_DIGEST_SIZE) == source.digest
        except OSError:
            return False

    def image_streams(self, pids: Collection[int]) -> Iterator[tuple[int, ByteStream]]:
        for pid in sorted(pids):
            path = self.path / image_name(pid)
            try:
                with path.open("rb") as file:
                    yield pid, FileStream(file, str(path))
            except OSError as exc:
                raise ImageError(f"cannot read {path}: {exc.strerror}") from exc
