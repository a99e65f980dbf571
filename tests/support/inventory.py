# SPDX-License-Identifier: Apache-2.0
"""The names of plugins in CRIU's inventory: what they should say, and how a test changes them.

The name of the images is written from docs/format.md alone, as the readers of plain_reader.py are.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path

import xxhash

from gpustasis.criu.images import INVENTORY_NAME, inventory_plugins
from support.plain_manifest import parse_manifest
from support.plain_reader import PlainImage

_MAGIC = struct.pack("<I", 0x58313116)
_KEY = b"\x62"  # protobuf: field 12, which has a length; of the list, and of each name in it
NAMES_IMAGES = "names-images"  # says that there is another, which begins with:
_IMAGES = "images-"


def images_name(directory: Path) -> str:
    """The name that belongs to the manifest and the images in `directory`."""
    manifest = parse_manifest((directory / "gpustasis-manifest.img").read_bytes())
    entries = b""
    for task in manifest.tasks:
        regions = bytes(16)
        if task.externalized:
            kind = "memory-" if task.kind else ""
            image = PlainImage((directory / f"gpustasis-{kind}{task.pid}.img").read_bytes())
            places = (struct.pack("<QQ", one.address, one.length) for one in image.regions)
            regions = xxhash.xxh3_128_digest(b"".join(places))
        entries += struct.pack("<IBBxx", task.pid, task.kind, task.externalized) + regions
    return _IMAGES + xxhash.xxh3_128_hexdigest(entries)


def write_inventory(directory: Path, *plugins: str, mark: str = "") -> None:
    """A small one. mark: tells it from others, in a field that nothing reads."""
    message = b"\x08\x02" + _packed(plugins)  # its version
    if mark:
        message += b"\x7a" + bytes([len(mark)]) + mark.encode()  # field 15
    path = directory / INVENTORY_NAME
    path.write_bytes(_MAGIC + struct.pack("<I", len(message)) + message)


def rename_images(directory: Path, name: str | None) -> None:
    """Have the inventory name these images; None: none, as gpustasis wrote it at first."""
    names = inventory_plugins(directory)
    kept = [one for one in names if one != NAMES_IMAGES and not one.startswith(_IMAGES)]
    assert len(kept) == len(names) - 2
    new = kept if name is None else [*kept, NAMES_IMAGES, name]
    path = directory / INVENTORY_NAME
    file = path.read_bytes()
    old = _packed(names)
    assert file.count(old) == 1
    message = file[8:].replace(old, _packed(new))
    path.write_bytes(file[:4] + struct.pack("<I", len(message)) + message)
    assert list(inventory_plugins(directory)) == new


def _packed(names: Sequence[str]) -> bytes:
    inner = b"".join(_KEY + bytes([len(name)]) + name.encode() for name in names)
    size = len(inner)
    length = bytes([size]) if size < 0x80 else bytes([size & 0x7F | 0x80, size >> 7])
    return _KEY + length + inner
