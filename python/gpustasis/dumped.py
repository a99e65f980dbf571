# SPDX-License-Identifier: Apache-2.0
"""What a dump that was broken off has stored of its tasks: in the clear, or sealed."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpustasis._core import (
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
    read_manifest,
    refill_dropped,
    remove_drop_record,
)
from gpustasis.criu.statistics import find_statistics, statistics_path
from gpustasis.errors import CheckpointError, ImageError

Progress = Callable[[int], None]


def is_sealed(images: Path) -> bool:
    """Whether a dump into `images` was sealed, as far as it came. It writes the envelope first."""
    return any(_is_there(images / name) for name in (ENVELOPE_NAME, SEALED_NAME))


@dataclass(frozen=True, slots=True)
class Dumped:
    """The directory of such a dump; key: None: it is in the clear."""

    images: Path
    key: DataKey | None = None

    def find_manifest(self, inner_pid: int) -> Manifest | None:
        """None: the dump did not come so far as to take anything out of a task. One that is sealed
        is written last: without it, what the images of task `inner_pid` say of themselves stands
        for it. Raises ImageError."""
        name = MANIFEST_NAME if self.key is None else SEALED_NAME
        try:
            if _is_there(self.images / name):
                return self._read_manifest()
            return None if self.key is None else self._of_images(inner_pid)
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
        statistics = find_statistics(self.images, "dump")
        manifest = self.images / (MANIFEST_NAME if self.key is None else SEALED_NAME)
        if statistics is None or not statistics.succeeded or not manifest.exists():
            return
        if statistics_path(self.images, "dump").stat().st_mtime_ns >= manifest.stat().st_mtime_ns:
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

    def _open(self, name: str) -> ImageReader:
        if self.key is None:
            return ImageReader.open(self.images / name)
        return ImageReader.find_sealed(self.images, name, self.key)

    def _read_manifest(self) -> Manifest:
        if self.key is None:
            return read_manifest(self.images)
        content = SealedReader.open(self.images, self.key).read(MANIFEST_NAME)
        return parse_manifest(content, MANIFEST_NAME)

    def _of_images(self, inner_pid: int) -> Manifest | None:
        found: list[ImageReader] = []
        for kind in (MemoryKind.GPU, MemoryKind.CPU):
            with suppress(FileNotFoundError):
                found.append(self._open(image_name(inner_pid, kind)))
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
