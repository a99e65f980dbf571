# SPDX-License-Identifier: Apache-2.0
"""The files of a sealed checkpoint's directory."""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from gpustasis._core import (
    ENVELOPE_NAME,
    MANIFEST_NAME,
    MAX_ENVELOPE_SIZE,
    PARENT_LINK,
    SEALED_NAME,
    SIGNATURE_NAME,
    STATEMENT_NAME,
    DataKey,
    Manifest,
    ManifestTask,
    Region,
    SealedReader,
    is_sealed_name,
)
from gpustasis.criu.images import INVENTORY_NAME, parent_pages
from gpustasis.criu.images import PARENT_LINK as CRIU_PARENT_LINK
from gpustasis.errors import CheckpointError, SealError
from gpustasis.files import open_new, open_regular, sync
from gpustasis.image.checkpoint import (
    NO_PARENT,
    find_manifest,
    is_sealed,
    open_image,
    open_pack,
)
from gpustasis.image.verification import require_all_in, require_no_manifest
from gpustasis.sealing.keys import (
    KeySource,
    KeyToken,
    configured_key,
    is_token,
    sealed_errors,
)

log = logging.getLogger(__name__)

_COPY_BYTES = 1 << 20  # at once
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


@contextmanager
def key_for_criu(
    directory: Path, key: str | os.PathLike[str] | KeySource | None
) -> Iterator[tuple[str | None, tuple[int, ...]]]:
    """What opens the checkpoint in `directory`, as the plugin is told, and descriptors for criu.
    A source is asked here, and the plugin reads what it has found from a pipe. Raises as
    open_key."""
    if is_token(key):
        key = KeyToken(str(key))
    elif key is None and isinstance(named := configured_key(os.environ), KeyToken):
        key = named
    if key is None or isinstance(key, str | os.PathLike):
        yield None if key is None else str(Path(key).absolute()), ()
        return
    if not is_sealed(directory):
        log.warning("the checkpoint in %s is not sealed: the key was not used", directory)
        yield None, ()
        return
    opened = open_key(directory, key)
    reading, writing = os.pipe2(os.O_CLOEXEC)
    try:
        try:
            opened.hand_on(writing)
        finally:
            os.close(writing)
        yield f"fd:{reading}", (reading,)
    finally:
        os.close(reading)


def open_sealed(directory: Path, key: DataKey) -> SealedReader:
    """The sealed files, whose inventory is the one that lies beside them in the clear; where
    CRIU's images are not sealed, there is none in them.

    Raises SealError, UnsupportedError.
    """
    with seal_errors(directory):
        sealed = SealedReader.open(directory, key)
        if INVENTORY_NAME not in sealed:
            return sealed
        inventory = sealed.read(INVENTORY_NAME)
    if read_inventory(directory) != inventory:
        raise SealError(f"{directory / INVENTORY_NAME} is not the one that was sealed")
    return sealed


# Inode, mode, size in bytes, mtime and ctime in ns: what differs once a file was changed, or
# another took its place.
Identity = tuple[int, int, int, int, int]


def files_to_seal(directory: Path, leave: Container[str] = ()) -> dict[str, Identity]:
    """Every file, by name, of what looks like a checkpoint that needs no other, but those that are
    to be left. Raises SealError for a directory that is none, and for what is no ordinary file or
    not finished; CheckpointError if it cannot be listed."""
    try:
        with os.scandir(directory) as items:
            found = {
                item.name: item.stat(follow_symlinks=False)
                for item in items
                if item.name not in leave
            }
    except OSError as exc:
        raise CheckpointError(f"cannot list {directory}: {exc.strerror}") from exc
    if any(map(is_sealed_name, found)):
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
    if manifest is None:
        require_no_manifest(directory)
    else:
        if manifest.parent_id != NO_PARENT:
            raise _needs_earlier(directory, MANIFEST_NAME)
        for task in manifest.tasks:
            if task.externalized and task.image_name not in names:
                raise SealError(
                    f"{directory} holds no whole checkpoint: {task.image_name} is missing"
                )
        require_all_in(directory, _stored(directory, manifest))
        open_pack(directory, manifest)
    for name in parent_pages(directory):
        raise _needs_earlier_dump(directory, name)


def _stored(directory: Path, manifest: Manifest) -> list[tuple[ManifestTask, list[Region]]]:
    """Every task, with the regions of its image. Raises ImageError, UnsupportedError."""
    return [
        (
            task,
            open_image(directory, manifest, task).info.regions if task.externalized else [],
        )
        for task in manifest.tasks
    ]


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
    read_inventory(directory)
    _copy(directory / INVENTORY_NAME, place / INVENTORY_NAME)


def copy_clear(directory: Path, place: Path, sealed: SealedReader) -> tuple[int, int]:
    """What lies in the clear beside sealed files that hold none of CRIU's images; how many files
    and bytes. Raises OSError for what cannot be written; SealError for what cannot be read, and for
    a file that is sealed as well."""
    files = size = 0
    if INVENTORY_NAME in sealed:
        return files, size
    with _reading(directory):
        modes = {name: (directory / name).lstat().st_mode for name in os.listdir(directory)}
    for name, mode in sorted(modes.items()):
        path = directory / name
        if is_sealed_name(name) or name in (PARENT_LINK, STATEMENT_NAME, SIGNATURE_NAME):
            continue  # no signature is of what is made here
        if not stat.S_ISREG(mode):
            raise SealError(f"{path} is no ordinary file, and only such are copied")
        if name in sealed:
            raise SealError(f"{path} lies in the clear beside a sealed one")
        files, size = files + 1, size + _copy(path, place / name)
    return files, size


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise SealError(f"cannot read {path}: {exc.strerror}") from exc


def _copy(source: Path, target: Path) -> int:
    with _reading(source):
        content = open_regular(source, os.O_NOFOLLOW)

    def piece() -> bytes:
        with _reading(source):
            return content.read(_COPY_BYTES)

    with content, open_new(target) as file:
        found = os.fstat(content.fileno())
        file.writelines(iter(piece, b""))
        file.flush()
        os.fchmod(file.fileno(), found.st_mode & 0o777)  # never for another to run as its owner
        os.utime(file.fileno(), ns=(found.st_atime_ns, found.st_mtime_ns))
        sync(file)
        return file.tell()
