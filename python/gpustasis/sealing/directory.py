# SPDX-License-Identifier: Apache-2.0
"""The files of a sealed checkpoint's directory."""

from __future__ import annotations

import os
import stat
from collections.abc import Container
from contextlib import AbstractContextManager
from pathlib import Path

from gpustasis._core import (
    ENVELOPE_NAME,
    MANIFEST_NAME,
    MAX_ENVELOPE_SIZE,
    PARENT_LINK,
    SEALED_NAME,
    DataKey,
    SealedReader,
)
from gpustasis.criu.images import INVENTORY_NAME, parent_pages
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.errors import CheckpointError, SealError
from gpustasis.files import open_new, open_regular, sync
from gpustasis.image.checkpoint import NO_PARENT, find_manifest, is_sealed
from gpustasis.sealing.keys import KeySource, sealed_errors

_MAX_INVENTORY = 4 << 20  # bytes; CRIU's has some hundred


def seal_errors(directory: Path) -> AbstractContextManager[None]:
    """As sealed_errors, of the sealed file in `directory`."""
    return sealed_errors(str(directory / SEALED_NAME))


def require_sealed(directory: Path) -> None:
    """Raise SealError unless a sealed checkpoint is there."""
    if not is_sealed(directory):
        raise SealError(f"{directory} is not sealed: it has no {SEALED_NAME}")


def read_file(path: Path, limit: int) -> bytes:
    """Raises SealError, also if it is longer than `limit` bytes."""
    try:
        with open_regular(path, os.O_NOFOLLOW) as file:
            content = file.read(limit + 1)
    except OSError as exc:
        raise SealError(f"cannot read {path}: {exc.strerror}") from exc
    if len(content) > limit:
        raise SealError(f"{path} is longer than {limit} bytes")
    return content


def read_inventory(directory: Path) -> bytes:
    """Raises SealError."""
    return read_file(directory / INVENTORY_NAME, _MAX_INVENTORY)


def open_key(directory: Path, source: KeySource) -> DataKey:
    """The data key in the envelope of `directory`. Raises SealError, UnsupportedError."""
    path = directory / ENVELOPE_NAME
    return source.unwrap(read_file(path, MAX_ENVELOPE_SIZE), str(path))


def open_sealed(directory: Path, key: DataKey) -> SealedReader:
    """The sealed file, whose inventory is the one that lies beside it in the clear.

    Raises SealError, UnsupportedError.
    """
    with seal_errors(directory):
        sealed = SealedReader.open(directory, key)
        inventory = sealed.read(INVENTORY_NAME)
    if read_inventory(directory) != inventory:
        raise SealError(f"{directory / INVENTORY_NAME} is not the one that was sealed")
    return sealed


# Inode, mode, size in bytes, mtime and ctime in ns: what differs once a file was changed, or
# another took its place.
Identity = tuple[int, int, int, int, int]


def files_to_seal(directory: Path) -> dict[str, Identity]:
    """Every file, by name, of what looks like a checkpoint that needs no other. Raises SealError
    for a directory that is none, and for what is no ordinary file or not finished; CheckpointError
    if it cannot be listed."""
    try:
        with os.scandir(directory) as items:
            found = {item.name: item.stat(follow_symlinks=False) for item in items}
    except OSError as exc:
        raise CheckpointError(f"cannot list {directory}: {exc.strerror}") from exc
    if ENVELOPE_NAME in found or SEALED_NAME in found:
        raise SealError(f"{directory} is sealed already, or was meant to be")
    if PARENT_LINK in found:
        raise _needs_earlier(directory, PARENT_LINK)
    if CRIU_PARENT_LINK in found:
        raise _needs_earlier_dump(directory, CRIU_PARENT_LINK)
    if INVENTORY_NAME not in found:
        raise SealError(f"{directory} holds no whole checkpoint: it has no {INVENTORY_NAME}")
    for name, status in found.items():
        if not stat.S_ISREG(status.st_mode):
            raise SealError(f"{directory / name} is no ordinary file, and only such are sealed")
        if name.startswith(".") and name.endswith(".part"):
            raise SealError(
                f"{directory / name} is not finished: somebody is writing it, or was killed; "
                "remove it if nobody is"
            )
    return {name: _identity(status) for name, status in found.items()}


def require_whole(directory: Path, names: Container[str]) -> None:
    """Raise SealError unless these files are all of what a restore needs, as they say themselves;
    ImageError, UnsupportedError if they cannot be read."""
    manifest = find_manifest(directory)
    if manifest is not None:
        if manifest.parent_id != NO_PARENT:
            raise _needs_earlier(directory, MANIFEST_NAME)
        for task in manifest.tasks:
            if task.externalized and task.image_name not in names:
                raise SealError(
                    f"{directory} holds no whole checkpoint: {task.image_name} is missing"
                )
    for name in parent_pages(directory):
        raise _needs_earlier_dump(directory, name)


def _needs_earlier(directory: Path, sign: str) -> SealError:
    return SealError(
        f"{directory} is built on an earlier checkpoint ({sign}), which would not be sealed with "
        "it: make a copy that needs no other with `gpustasis flatten`, and seal that"
    )


def _needs_earlier_dump(directory: Path, sign: str) -> SealError:
    return SealError(
        f"{directory} is built on an earlier dump of CRIU's ({sign}), which would not be sealed "
        "with it, and cannot be copied into it either: it takes a dump without --prev-images-dir"
    )


def _identity(status: os.stat_result) -> Identity:
    return (
        *(status.st_ino, status.st_mode, status.st_size),
        *(status.st_mtime_ns, status.st_ctime_ns),
    )


def copy_inventory(directory: Path, place: Path) -> None:
    """With mode and times, synced. Raises OSError, SealError."""
    content = read_inventory(directory)
    try:
        found = os.lstat(directory / INVENTORY_NAME)
    except OSError as exc:
        raise SealError(f"cannot read {directory / INVENTORY_NAME}: {exc.strerror}") from exc
    with open_new(place / INVENTORY_NAME) as file:
        file.write(content)
        file.flush()
        os.fchmod(file.fileno(), stat.S_IMODE(found.st_mode))
        os.utime(file.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        sync(file)
