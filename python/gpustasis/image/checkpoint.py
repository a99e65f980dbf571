# SPDX-License-Identifier: Apache-2.0
"""Our files in an image directory: the manifest and the images it names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import UUID

from gpustasis._core import (
    MANIFEST_NAME,
    CorruptDataError,
    ImageReader,
    Manifest,
    ManifestTask,
    UnsupportedDataError,
    image_name,
    read_manifest,
)
from gpustasis.errors import ImageError, UnsupportedError

_IMAGE_NAME = re.compile(r"gpustasis-([1-9][0-9]{0,9})\.img")


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


def find_manifest(directory: Path) -> Manifest | None:
    """The manifest in `directory`; None if there is none. Raises ImageError, UnsupportedError."""
    if not (directory / MANIFEST_NAME).is_symlink() and not (directory / MANIFEST_NAME).exists():
        return None
    with image_errors():
        return read_manifest(directory)


def open_image(directory: Path, manifest: Manifest, task: ManifestTask) -> ImageReader:
    """The image of `task`, found to be the one the manifest means; its chunks are not read.

    Raises ImageError, UnsupportedError; each names the file.
    """
    path = directory / image_name(task.pid)
    with image_errors():
        image = ImageReader.open(path)
    require_meant(image, manifest, task, str(path))
    return image


def require_meant(image: ImageReader, manifest: Manifest, task: ManifestTask, path: str) -> None:
    """Raise ImageError if `image`, which lies at `path`, is not what the manifest means."""
    if image.info.pid != task.pid:
        raise ImageError(f"{path}: is the image of pid {image.info.pid}")
    if image.info.checkpoint_id != manifest.checkpoint_id:
        raise ImageError(f"{path}: belongs to another checkpoint")
    if image.digest != task.digest:
        raise ImageError(f"{path}: is not the image the manifest means: the digests differ")


def image_names(directory: Path) -> list[str]:
    """Names in `directory` that are those of images, sorted. Raises ImageError."""
    with image_errors():
        return sorted(p.name for p in directory.iterdir() if image_pid(p.name) is not None)


def image_pid(name: str) -> int | None:
    """The pid that the name of an image says; None if it is none's."""
    match = _IMAGE_NAME.fullmatch(name)
    return int(match[1]) if match else None


def gpu_uuid(raw: bytes) -> str:
    """As nvidia-smi prints it: "GPU-" and a UUID."""
    return f"GPU-{UUID(bytes=raw)}"
