# SPDX-License-Identifier: Apache-2.0
"""What images and manifests are made of alike, in plain Python, from docs/format.md alone."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import xxhash

from gpustasis.errors import ImageError, UnsupportedError

FEATURE_PARENT = 1 << 0
NO_ID = bytes(16)
MAX_GPUS = 256
MAX_DEPTH = 65535  # of a source, and length of a chain

_VERSION = 1
START = struct.Struct("<8sIIQQ")
GPU = struct.Struct("<16sQ256s")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainGpu:
    uuid: bytes
    memory_size: int
    name: bytes


def parse_gpus(raw: bytes, offset: int, count: int) -> tuple[PlainGpu, ...]:
    gpus = []
    for i in range(count):
        uuid, memory_size, name = GPU.unpack_from(raw, offset + GPU.size * i)
        gpus.append(PlainGpu(uuid=uuid, memory_size=memory_size, name=text(name)))
    return tuple(gpus)


def check_start(file: bytes, magic: bytes, size: int, found_hash: bytes, hashed: bytes) -> int:
    """Check what images and manifests begin with; their required features.

    found_hash: as stored; hashed: what it covers. Raises ImageError, UnsupportedError.
    """
    found_magic, version, header_size, required, _optional = START.unpack_from(file)
    require(found_magic == magic, "wrong magic")
    require(xxhash.xxh3_128_digest(hashed) == found_hash, "header damaged")
    if version != _VERSION:
        raise UnsupportedError(f"format version {version}, this reader knows {_VERSION}")
    require(header_size == size, "header has the wrong size")
    if required & ~FEATURE_PARENT:
        raise UnsupportedError(f"required features {required:#x} are not all known")
    return int(required)


def text(field: bytes) -> bytes:
    """A textN without its padding. Raises ImageError."""
    stripped = field.rstrip(b"\0")
    padded = len(stripped) < len(field) and b"\0" not in stripped
    require(padded, "text is not padded with zero bytes")
    return stripped


def require(condition: bool, otherwise: str) -> None:
    """Raises ImageError(otherwise) unless condition."""
    if not condition:
        raise ImageError(otherwise)
