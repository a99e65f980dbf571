# SPDX-License-Identifier: Apache-2.0
"""CRIU's images in one file: docs/format.md, "Pack"."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gpustasis._core import PACK_NAME, Manifest, PackReader
from gpustasis.criu.images import INVENTORY_NAME
from gpustasis.errors import ImageError
from gpustasis.files import open_new, open_regular, sync
from gpustasis.image.checkpoint import READ_LIMIT, image_errors, open_pack

# CRIU reads these before it asks any plugin.
_READ_EARLY = re.compile(r"inventory\.img|pstree\.img|cpuinfo\.img|ids-.*\.img", re.DOTALL)


def is_read_early(name: str) -> bool:
    """Whether a packed checkpoint has this image of CRIU's in the open as well."""
    return _READ_EARLY.fullmatch(name) is not None


def packed_names(directory: Path, manifest: Manifest) -> set[str]:
    """Names of the files that are packed there. Raises ImageError, UnsupportedError."""
    pack = open_pack(directory, manifest)
    return set() if pack is None else {file.name for file in pack.files}


def verify_pack(directory: Path, manifest: Manifest, threads: int = 0) -> PackReader | None:
    """Check all of it, and that what lies in the open is what it holds. None: there is none, as the
    manifest says. Raises ImageError, UnsupportedError."""
    pack = open_pack(directory, manifest)
    if pack is None:
        return None
    with image_errors((PACK_NAME, str(directory / PACK_NAME))):
        pack.verify(threads)
    packed = {file.name for file in pack.files}
    with image_errors():
        beside = {name for name in os.listdir(directory) if is_read_early(name)}
    for name in sorted(beside | {name for name in packed if is_read_early(name)}):
        same = name in packed and name in beside
        with image_errors((PACK_NAME, str(directory / PACK_NAME))):
            same = same and _read(directory / name) == pack.read(name)
        if not same:
            raise ImageError(f"{directory / PACK_NAME}: {name} is not the one beside it")
    if INVENTORY_NAME not in packed:
        raise ImageError(f"{directory / PACK_NAME}: holds no {INVENTORY_NAME}")
    return pack


def unpack(pack: PackReader, place: Path, threads: int = 0) -> int:
    """Write what is packed, but for the inventory, to `place`, synced; bytes of these files.

    Raises ImageError; OSError.
    """
    if all(file.name != INVENTORY_NAME for file in pack.files):
        raise ImageError(f"{PACK_NAME} of {place}: holds no {INVENTORY_NAME}")
    with image_errors((PACK_NAME, f"{PACK_NAME} of {place}")):
        pack.extract(place, threads, INVENTORY_NAME)
    size = 0
    for file in pack.files:
        if file.name != INVENTORY_NAME:
            with (place / file.name).open("rb") as written:
                os.fsync(written.fileno())
            size += file.size
    return size


def unpack_inventory(pack: PackReader, place: Path) -> int:
    """The last step of an unpack(): what lacks it is no checkpoint. Raises as that."""
    with image_errors():
        content = pack.read(INVENTORY_NAME)
    (mode,) = (file.mode for file in pack.files if file.name == INVENTORY_NAME)
    half = place / f".{INVENTORY_NAME}"  # cut short, it would look like a checkpoint's
    with open_new(half) as file:
        file.write(content)
        os.fchmod(file.fileno(), mode)
        sync(file)
    half.rename(place / INVENTORY_NAME)
    return len(content)


def _read(path: Path) -> bytes:
    with image_errors(), open_regular(path) as file:
        return file.read(READ_LIMIT + 1)
