# SPDX-License-Identifier: Apache-2.0
"""The chunk codec, through Python."""

from __future__ import annotations

import lz4.block
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from gpustasis._core import (
    MAX_CHUNK_SIZE,
    CorruptDataError,
    Encoding,
    UnsupportedDataError,
    decode_chunk,
    encode_chunk,
    hash64,
    hash128,
)
from support.image_samples import noise

chunks = st.one_of(
    st.binary(min_size=1, max_size=2000),
    st.builds(bytes, st.integers(1, 70000)),
    st.builds(lambda b, n: b * n, st.binary(min_size=1, max_size=8), st.integers(1, 5000)),
    st.builds(lambda n, seed: noise(n, str(seed)), st.integers(1, 70000), st.integers(0, 99)),
)


@given(plain=chunks, compress=st.booleans())
def test_decoding_gives_back_what_was_encoded(plain: bytes, compress: bool) -> None:
    encoding, stored = encode_chunk(plain, compress)
    assert len(stored) <= len(plain)
    decoded = bytearray(b"\xaa" * len(plain))
    decode_chunk(encoding, stored, decoded)
    assert decoded == plain


@given(plain=chunks)
def test_the_encoding_follows_the_rule(plain: bytes) -> None:
    encoding, stored = encode_chunk(plain)
    assert (encoding == Encoding.ZERO) == (not any(plain))
    if encoding == Encoding.LZ4:
        assert len(stored) <= len(plain) - len(plain) // 16
        assert lz4.block.decompress(stored, uncompressed_size=len(plain)) == plain
    elif encoding == Encoding.RAW:
        assert stored == plain
        best = len(lz4.block.compress(plain, store_size=False))
        assert best >= len(plain) or best > len(plain) - len(plain) // 16


@given(data=st.binary(max_size=2000))
def test_hashes_are_those_of_xxhash(data: bytes) -> None:
    assert hash128(data) == xxhash.xxh3_128_digest(data)
    assert hash64(data) == xxhash.xxh3_64_intdigest(data)


@given(stored=st.binary(max_size=300), size=st.integers(1, 5000))
def test_nothing_hostile_gets_past_the_decoder(stored: bytes, size: int) -> None:
    plain = bytearray(size)
    try:
        decode_chunk(Encoding.LZ4, stored, plain)
    except CorruptDataError:
        return
    assert lz4.block.decompress(stored, uncompressed_size=size) == plain


@pytest.mark.parametrize("size", [0, MAX_CHUNK_SIZE + 1])
def test_sizes_out_of_range_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="out of range"):
        encode_chunk(bytes(size))


def test_buffers_are_used_in_place() -> None:
    whole = bytearray(b"\x01" * 8192)
    encoding, stored = encode_chunk(memoryview(whole)[:4096])
    decode_chunk(encoding, stored, memoryview(whole)[4096:])
    assert whole == b"\x01" * 8192
    with pytest.raises(BufferError):
        decode_chunk(encoding, stored, bytes(4096))
    with pytest.raises(BufferError):
        encode_chunk(memoryview(whole)[::2])


def test_errors_of_data_are_of_their_own_kind() -> None:
    assert issubclass(UnsupportedDataError, NotImplementedError)
    assert issubclass(CorruptDataError, ValueError)
