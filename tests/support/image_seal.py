# SPDX-License-Identifier: Apache-2.0
"""Make the checksums of a changed image right, so that what they cover is looked at."""

from __future__ import annotations

import struct

import xxhash


def sealed(file: bytearray) -> bytes:
    """`file` with all its checksums made right, if its trailer lets them be found."""
    put = struct.pack_into
    header_hash = xxhash.xxh3_128_digest(file[:240])
    put("16s", file, 240, header_hash)
    trailer = len(file) - 128
    metadata, metadata_size = struct.unpack_from("<QQ", file, trailer)
    index, count = struct.unpack_from("<QQ", file, trailer + 32)
    put("16s", file, trailer + 16, xxhash.xxh3_128_digest(file[metadata:][:metadata_size]))
    put("16s", file, trailer + 48, xxhash.xxh3_128_digest(file[index:][: 40 * count]))
    put("16s", file, trailer + 64, header_hash)
    put("16s", file, trailer + 112, xxhash.xxh3_128_digest(file[trailer : trailer + 112]))
    return bytes(file)
