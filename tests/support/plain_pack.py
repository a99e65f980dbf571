# SPDX-License-Identifier: Apache-2.0
"""A second reader of packs, in plain Python, written from docs/format.md alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass

from support.plain_manifest import FILES, NO_ID, require
from support.plain_reader import PlainImage

_HEAD = struct.Struct("<QQ16s")
_ENTRY = struct.Struct("<HHIQQ")
_PAGE = 4096
_MAX_FILES = 1 << 18
_MAX_INDEX = 128 << 20
_MAX_SIZE = 1 << 52


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainPacked:
    name: bytes
    mode: int
    mtime_ns: int
    content: bytes


def read_pack(file: bytes) -> tuple[PlainImage, tuple[PlainPacked, ...]]:
    """All of it, checked. Raises ImageError, UnsupportedError."""
    image = PlainImage(file)
    image.verify()
    require(image.kind == FILES and image.pid == 1 and image.parent_id == NO_ID, "no pack")
    require(len(image.regions) == 1 and image.regions[0].address == 0, "no pack")
    content = b"".join(image.read_chunk(index) for index in range(len(image.chunks)))
    count, index_size, reserved = _HEAD.unpack_from(content)
    require(not any(reserved), "a reserved byte is not zero")
    require(count <= _MAX_FILES and index_size <= _MAX_INDEX, "index out of bounds")
    end = _HEAD.size + index_size
    require(end <= len(content), "index beyond the end")
    entries, at = [], _HEAD.size
    for _ in range(count):
        require(at + _ENTRY.size <= end, "index too short")
        name_size, mode, zero, size, mtime_ns = _ENTRY.unpack_from(content, at)
        name = content[at + _ENTRY.size : at + _ENTRY.size + name_size]
        at += _ENTRY.size + name_size
        require(at <= end and zero == 0 and mode <= 0o777 and size <= _MAX_SIZE, "bad entry")
        require(1 <= name_size <= 255 and name not in (b".", b".."), "bad name")
        require(not {*b"/\0"} & {*name} and not name.startswith(b"gpustasis-"), "bad name")
        entries.append((name, mode, mtime_ns, size))
    require(at == end, "index too long")
    names = [entry[0] for entry in entries]
    require(names == sorted(set(names)), "names do not ascend")
    files = []
    at = _pad(content, end)
    for name, mode, mtime_ns, size in entries:
        require(at + size <= len(content), "a file beyond the end")
        part = content[at : at + size]
        files.append(PlainPacked(name=name, mode=mode, mtime_ns=mtime_ns, content=part))
        at = _pad(content, at + size)
    require(at == len(content), "the files do not fill the region")
    return image, tuple(files)


def _pad(content: bytes, at: int) -> int:
    """The next whole page; what lies before it is zero."""
    end = -(-at // _PAGE) * _PAGE
    require(not any(content[at:end]), "padding is not zero")
    return end
