# SPDX-License-Identifier: Apache-2.0
"""Archives that kubelets have left on their node."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from pathlib import Path

from gpustasis.archive.layout import (
    CHECKPOINT,
    CONFIG,
    ROOTFS_DIFF,
    SPEC,
    ContainerFacts,
    read_facts,
    require_container,
)
from gpustasis.archive.stream import DEFAULT_LIMITS, UnpackedStream, detect
from gpustasis.archive.tar import TarReader
from gpustasis.errors import ArchiveError, CheckpointError

DIRECTORY = Path("/var/lib/kubelet/checkpoints")
_SUFFIX = ".tar"


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedArchive:
    """One archive. checkpoint_bytes: of CRIU's images and ours. rootfs_diff_bytes: of what the
    container changed in its file system; None: it changed nothing.
    """

    path: Path
    facts: ContainerFacts
    checkpoint_bytes: int
    rootfs_diff_bytes: int | None


def list_archives(directory: Path) -> tuple[list[ListedArchive], list[ArchiveError]]:
    """The archives (*.tar) in `directory`, by name, and what was wrong with others.

    Raises CheckpointError if the directory cannot be read.
    """
    try:
        names = sorted(name for name in os.listdir(directory) if name.endswith(_SUFFIX))
    except OSError as exc:
        raise CheckpointError(f"cannot list {directory}: {exc.strerror}") from exc
    archives, errors = [], []
    for name in names:
        try:
            archives.append(read_archive(directory / name))
        except ArchiveError as exc:
            errors.append(exc)
    return archives, errors


def read_archive(path: Path) -> ListedArchive:
    """What one archive says of itself. One pass over its headers; no content of an image is read.

    Raises ArchiveError if it is none, damaged, or beyond the default limits.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise ArchiveError(f"{path}: is no regular file")
            name = str(path)
            stream = UnpackedStream(file, detect(file, name), DEFAULT_LIMITS, name)
            return _read(TarReader(stream, DEFAULT_LIMITS), path)
    except OSError as exc:
        raise ArchiveError(f"{path}: cannot be read: {exc.strerror}") from exc


def _read(reader: TarReader, path: Path) -> ListedArchive:
    small: dict[str, bytes] = {}
    names: set[str] = set()
    images, diff = 0, None
    limit = DEFAULT_LIMITS.kept_file_bytes
    for member in reader:
        names.add(member.name)
        if member.name.startswith(CHECKPOINT):
            images += member.size
        elif member.name == ROOTFS_DIFF:
            diff = member.size
        elif member.name in (CONFIG, SPEC):
            if member.size > limit:
                raise ArchiveError(
                    f"{path}: {member.name} has {member.size} bytes; {limit} are the limit"
                )
            small[member.name] = reader.read(member.size)
    require_container(names, str(path))
    facts = read_facts(small, names, str(path))
    return ListedArchive(path=path, facts=facts, checkpoint_bytes=images, rootfs_diff_bytes=diff)
