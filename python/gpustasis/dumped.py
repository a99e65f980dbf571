# SPDX-License-Identifier: Apache-2.0
"""What a dump that was broken off has stored of its tasks: in the clear, or sealed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
    ARENA_OWNER,
    ENVELOPE_NAME,
    MANIFEST_NAME,
    SEALED_NAME,
    DataKey,
    ImageInfo,
    ImageReader,
    Manifest,
    ManifestTask,
    MemoryKind,
    SealedReader,
    image_name,
    parse_manifest,
    read_arena_owner,
    read_manifest,
    refill_dropped,
    remove_drop_record,
    restore_handed_over,
    stored_directory,
)
from gpustasis.criu.statistics import find_statistics, statistics_path
from gpustasis.dump_records import find_begun, find_dropped
from gpustasis.errors import CheckpointError, ImageError

Progress = Callable[[int], None]


def is_sealed(images: Path) -> bool:
    """Whether a dump into `images` was sealed, as far as it came. It writes the envelope first."""
    return any(_is_there(images / name) for name in (ENVELOPE_NAME, SEALED_NAME))


def find_stored(images: Path) -> Path:
    """Where the images of a dump into `images` are: there, or in an arena (docs/format.md, "In
    memory first"). Raises ImageError if they are gone."""
    try:
        return stored_directory(images)
    except (ValueError, OSError, NotImplementedError) as exc:
        raise ImageError(str(exc)) from exc


def told_in(images: Path) -> Path:
    """Where the dump whose images are in `images` has left its statistics."""
    if not _is_there(images / ARENA_OWNER):
        return images
    try:
        return Path(read_arena_owner(images).images)
    except (ValueError, OSError, NotImplementedError) as exc:
        raise ImageError(f"cannot tell whose images are in {images}: {exc}") from exc


@dataclass(frozen=True, slots=True)
class Dumped:
    """The directory of such a dump; key: None: it is in the clear."""

    images: Path
    key: DataKey | None = None

    def find_manifest(self, pid: int, inner_pid: int) -> Manifest | None:
        """None: the dump did not come so far as to take anything out of process `pid`, `inner_pid`
        to itself. It gets its name last: without it, what the images of that task say of themselves
        stands for it. Raises ImageError."""
        name = MANIFEST_NAME if self.key is None else SEALED_NAME
        try:
            if _is_there(self.images / name):
                return self._read_manifest()
            return self._of_images(pid, inner_pid)
        except (ValueError, OSError, NotImplementedError) as exc:
            raise ImageError(f"cannot read the manifest in {self.images}: {exc}") from exc

    def info(self, name: str) -> ImageInfo:
        """Of the image `name`. Raises ImageError."""
        try:
            return self._open(name).info
        except (ValueError, OSError, NotImplementedError) as exc:
            raise ImageError(f"cannot read {self.images / name}: {exc}") from exc

    def require_unfinished(self) -> None:
        """Refuse the images of a dump that came to its end: another one left the task behind.
        Statistics are written last; those older than the manifest are of an earlier dump into the
        same place. Raises CheckpointError."""
        told = told_in(self.images)
        statistics = find_statistics(told, "dump")
        manifest = self.images / (MANIFEST_NAME if self.key is None else SEALED_NAME)
        if statistics is None or not statistics.succeeded or not manifest.exists():
            return
        if statistics_path(told, "dump").stat().st_mtime_ns >= manifest.stat().st_mtime_ns:
            raise CheckpointError(
                f"the dump into {self.images} was not broken off; name the directory of the one "
                "that was"
            )

    def refill(
        self, pid: int, name: str, digests: tuple[bytes, bytes], threads: int, tell: Progress | None
    ) -> int:
        """Put back what was taken out of process `pid`; bytes of it. digests: the checkpoint's id
        and the image's digest. Raises ImageError."""
        try:
            size = refill_dropped(
                *(self.images, pid, name, *digests, threads), progress=tell, key=self.key
            )
            remove_drop_record(pid)
        except (ValueError, OSError, NotImplementedError) as exc:
            raise ImageError(f"cannot put back {self.images / name}: {exc}") from exc
        return size

    def digests(self, name: str) -> tuple[bytes, bytes] | None:
        """Of the image `name`: the checkpoint's id and its own digest; None: there is none. An
        image has its name when it is complete. Raises ImageError."""
        try:
            image = self._open(name)
        except FileNotFoundError:
            return None
        except (ValueError, OSError, NotImplementedError) as exc:
            raise ImageError(f"cannot read {self.images / name}: {exc}") from exc
        return image.info.checkpoint_id, image.digest

    def hand_back(
        self,
        pid: int,
        name: str,
        digests: tuple[bytes, bytes],
        library: str,
        threads: int,
        tell: Progress | None,
    ) -> int:
        """Have the driver of `library`, which was initialised, restore process `pid` with the
        memory of the image `name`; bytes of it. Raises ImageError."""
        try:
            return restore_handed_over(
                *(self.images, pid, name, *digests, library, threads), progress=tell, key=self.key
            )
        except (ValueError, OSError, NotImplementedError) as exc:
            raise ImageError(f"cannot hand back {self.images / name}: {exc}") from exc

    def _open(self, name: str) -> ImageReader:
        if self.key is None:
            return ImageReader.open(self.images / name)
        return ImageReader.find_sealed(self.images, name, self.key)

    def _read_manifest(self) -> Manifest:
        if self.key is None:
            return read_manifest(self.images)
        content = SealedReader.open(self.images, self.key).read(MANIFEST_NAME)
        return parse_manifest(content, MANIFEST_NAME)

    def _of_images(self, pid: int, inner_pid: int) -> Manifest | None:
        """An image may be of an earlier dump into the same directory, whole or not: one of GPU
        memory stands for something only where a record of the process is of its dump."""
        dropped = find_dropped(pid)
        begun = None
        with suppress(CheckpointError):  # of a record that cannot be read: as if there were none
            begun = find_begun(pid)
        of_dump = [one.checkpoint_id for one in (dropped, begun) if one is not None]
        found: list[ImageReader] = []
        for kind in (MemoryKind.GPU, MemoryKind.CPU):
            is_gpu = kind is MemoryKind.GPU
            if is_gpu and not of_dump:
                continue
            try:
                image = self._open(image_name(inner_pid, kind))
            except FileNotFoundError:
                continue
            except (ValueError, OSError, NotImplementedError):
                if is_gpu and dropped is not None:
                    raise
                continue
            is_of_dump = not is_gpu or image.info.checkpoint_id in of_dump
            if is_of_dump and image.info.kind == kind:
                found.append(image)
        if not found:
            return None
        tasks = [
            ManifestTask(
                pid=inner_pid,
                externalized=True,
                digest=image.digest,
                state_before=image.info.state_before,
                kind=image.info.kind,
            )
            for image in found
        ]
        first = found[0].info
        return Manifest(
            checkpoint_id=first.checkpoint_id,
            driver_api_version=first.driver_api_version,
            driver_version=first.driver_version,
            gpus=first.gpus,
            tasks=tasks,
        )


def _is_there(path: Path) -> bool:
    """A link that leads nowhere is: it says nothing of the dump. Raises ImageError."""
    try:
        os.lstat(path)
    except FileNotFoundError:
        return False
    except OSError as exc:
        raise ImageError(f"cannot look at {path}: {exc.strerror}") from exc
    return True
