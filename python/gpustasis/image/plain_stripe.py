"""Stripe files in plain Python, from docs/format.md alone."""

from __future__ import annotations

import struct

import xxhash

from gpustasis.image.plain_fields import FEATURE_STRIPES, START, check_start, require

HEADER_SIZE = 96
TRAILER_SIZE = 64
MAX_STRIPES = 16

_MAGIC = b"\x93GPUSST\n"
_TRAILER_MAGIC = b"GPSSEND\n"
_HEADER = struct.Struct("<16sIII20s")
_TRAILER = struct.Struct("<Q16s16s8s16s")


def check_stripe(
    file: bytes,
    *,
    checkpoint_id: bytes,
    pid: int,
    stripe: int,
    alignment: int,
    entries_hash: bytes,
) -> None:
    """Check that a whole stripe file is the one that an image says, but for chunks and the padding
    after them. Raises ImageError, UnsupportedError."""
    data_begin = -(-HEADER_SIZE // alignment) * alignment
    require(len(file) >= data_begin + TRAILER_SIZE, "too short for a stripe")
    header = file[:HEADER_SIZE]
    required = check_start(header, _MAGIC, HEADER_SIZE, header[80:], header[:80])
    require(required == FEATURE_STRIPES, "features that a stripe cannot have")
    *found, reserved = _HEADER.unpack_from(header, START.size)
    require(not any(reserved), "a reserved byte is not zero")
    require(found == [checkpoint_id, pid, stripe, alignment], "a stripe of another image")
    trailer = file[-TRAILER_SIZE:]
    file_size, found_hash, header_hash, magic, digest = _TRAILER.unpack(trailer)
    require(xxhash.xxh3_128_digest(trailer[:48]) == digest, "trailer of a stripe damaged")
    require(magic == _TRAILER_MAGIC and file_size == len(file), "trailer of a stripe malformed")
    require(header_hash == header[80:], "header and trailer do not belong together")
    require(found_hash == entries_hash, "a stripe holds other chunks than the index says")
    require(not any(file[HEADER_SIZE:data_begin]), "padding is not zero")
