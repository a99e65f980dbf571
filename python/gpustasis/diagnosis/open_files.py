# SPDX-License-Identifier: Apache-2.0
"""Whether the files that a checkpoint's processes had open are as large as they were: CRIU opens
them again by their paths, and ends at the first one of another size."""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator

from gpustasis._core import Manifest
from gpustasis.criu.images import (
    FILES_NAME,
    MOUNTS_PREFIX,
    REMAPS_NAME,
    parse_open_files,
    parse_remapped,
)
from gpustasis.diagnosis import Finding, note, ok, problem
from gpustasis.errors import ImageError
from gpustasis.image.checkpoint import CheckpointFiles, DirectoryFiles
from gpustasis.image.pack import packed_names
from gpustasis.text import plural

_NAME = "open files"
_SHOWN = 5
_KERNELS = ("/proc/", "/sys/", "/dev/")  # these have sizes of their own, or none


def check(
    files: CheckpointFiles, manifest: Manifest | None, compared: Collection[str]
) -> Iterator[Finding]:
    """Of a checkpoint of processes of the host. compared: paths of files that were looked at
    already, as mapped ones. Raises ImageError, UnsupportedError of what cannot be read."""
    names = set(files.sizes())
    if manifest is not None and isinstance(files, DirectoryFiles):
        names |= packed_names(files.directory, manifest)
    raw, remaps = files.read(FILES_NAME), files.read(REMAPS_NAME)
    if raw is None:
        return
    if any(name.startswith(MOUNTS_PREFIX) for name in names):
        yield note(_NAME, "not compared: the processes had mounts of their own")
        return
    try:
        found = parse_open_files(raw, files.place(FILES_NAME))
        known = frozenset() if remaps is None else parse_remapped(remaps, files.place(REMAPS_NAME))
    except ImageError as exc:
        yield problem(_NAME, str(exc), "make a new checkpoint")
        return
    looked_at = {
        path: size
        for number, (path, size) in found.items()
        if number not in known and path not in compared and not path.startswith(_KERNELS)
    }
    different = [text for path, size in looked_at.items() if (text := _difference(path, size))]
    if different:
        more = len(different) - _SHOWN
        shown = "; ".join(different[:_SHOWN]) + (f"; and {more} more" if more > 0 else "")
        yield problem(_NAME, shown, "put them back as they were: CRIU compares sizes")
    elif looked_at:
        yield ok(_NAME, f"{plural(len(looked_at), 'file')} as large as at the dump")


def _difference(path: str, size: int) -> str:
    """A sentence; empty: there is none."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as exc:  # ValueError: a NUL in it
        return f"{path} cannot be found: {getattr(exc, 'strerror', None) or exc}"
    if not stat.S_ISREG(status.st_mode):
        return f"{path} is no regular file"
    return "" if status.st_size == size else f"{path} has {status.st_size} bytes, and had {size}"
