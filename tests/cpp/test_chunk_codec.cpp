// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/chunk_codec.hpp"
#include "core/hash.hpp"

#include <array>

using namespace gpustasis;
using sample::Buffer;

namespace {

struct Encoded {
    Encoding encoding;
    Buffer stored;
};

Encoded encode(const Buffer& plain, bool compress = true) {
    Buffer scratch(lz4_limit(plain.size()));
    const EncodedChunk chunk = encode_chunk(plain, compress, 1, scratch);
    return {chunk.encoding, Buffer(chunk.stored.begin(), chunk.stored.end())};
}

void each_kind_of_content_gets_its_encoding() {
    CHECK(encode(Buffer(65536)).encoding == Encoding::zero);
    CHECK(encode(Buffer(65536)).stored.empty());
    CHECK(encode(sample::pattern_bytes(65536)).encoding == Encoding::lz4);
    CHECK(encode(sample::random_bytes(65536, 1)).encoding == Encoding::raw);
    CHECK(encode(sample::pattern_bytes(65536), false).encoding == Encoding::raw);
    CHECK(encode(Buffer(65536), false).encoding == Encoding::zero);
}

void decoding_gives_back_what_was_encoded() {
    for (std::size_t size = 1; size < 20000; size = size * 3 / 2 + 1)
        for (const Buffer& plain :
             {Buffer(size), sample::pattern_bytes(size), sample::random_bytes(size, size)}) {
            const Encoded encoded = encode(plain);
            CHECK(encoded.stored.size() <= size);
            Buffer decoded(size, std::byte{0xaa});
            decode_chunk(encoded.encoding, encoded.stored, decoded);
            CHECK(decoded == plain);
        }
}

// As a caller in Python may have them.
void raw_bytes_may_overlap_what_they_decode_to() {
    const Buffer plain = sample::random_bytes(8192, 3);
    Buffer both(plain);
    both.resize(plain.size() + 100);
    decode_chunk(Encoding::raw, Bytes(both).first(plain.size()), MutBytes(both).subspan(100));
    CHECK(std::equal(plain.begin(), plain.end(), both.begin() + 100));
}

void lz4_is_kept_only_if_it_saves_a_sixteenth() {
    // Random bytes with a compressible end: vary its length across the threshold.
    bool raw_seen = false;
    bool lz4_seen = false;
    for (std::size_t tail = 0; tail <= 1024; tail += 8) {
        Buffer plain = sample::random_bytes(8192, 5);
        std::fill(plain.end() - static_cast<std::ptrdiff_t>(tail), plain.end(), std::byte{7});
        const Encoded encoded = encode(plain);
        if (encoded.encoding == Encoding::lz4) {
            CHECK(encoded.stored.size() <= 8192 - 8192 / 16);
            lz4_seen = true;
        } else {
            CHECK(encoded.encoding == Encoding::raw);
            CHECK(tail < 640);
            raw_seen = true;
        }
    }
    CHECK(raw_seen && lz4_seen);
}

void one_set_bit_anywhere_is_not_zero() {
    for (const std::size_t size : {1U, 63U, 64U, 65U, 128U, 4096U}) {
        Buffer bytes(size);
        CHECK(is_zero(bytes));
        for (std::size_t i = 0; i < size; ++i) {
            bytes[i] = std::byte{0x80};
            CHECK(!is_zero(bytes));
            bytes[i] = std::byte{0};
        }
    }
    CHECK(is_zero({}));
}

void sizes_out_of_range_are_refused() {
    Buffer scratch(kMaxChunkSize + 1);
    const Buffer large(kMaxChunkSize + 1, std::byte{1});
    CHECK_THROWS(Errc::bad_argument, encode_chunk({}, true, 1, scratch));
    CHECK_THROWS(Errc::bad_argument, encode_chunk(large, true, 1, scratch));
    const Buffer page = sample::pattern_bytes(4096);
    CHECK_THROWS(Errc::bad_argument, encode_chunk(page, true, 0, scratch));
    CHECK_THROWS(Errc::bad_argument, encode_chunk(page, true, kMaxAcceleration + 1, scratch));
    CHECK_THROWS(Errc::bad_argument, encode_chunk(page, true, 1, MutBytes(scratch).first(100)));
}

void every_truncation_is_reported() {
    const Buffer plain = sample::pattern_bytes(4096);
    const Encoded encoded = encode(plain);
    Buffer decoded(plain.size());
    for (std::size_t keep = 0; keep < encoded.stored.size(); ++keep)
        CHECK_THROWS(Errc::corrupt_data,
                     decode_chunk(Encoding::lz4, Bytes(encoded.stored).first(keep), decoded));
}

void stored_bytes_that_disagree_with_the_size_are_reported() {
    Buffer plain(4096);
    const Buffer one(1);
    CHECK_THROWS(Errc::corrupt_data, decode_chunk(Encoding::zero, one, plain));
    CHECK_THROWS(Errc::corrupt_data, decode_chunk(Encoding::raw, one, plain));
    CHECK_THROWS(Errc::unsupported, decode_chunk(static_cast<Encoding>(3), {}, plain));
    CHECK_THROWS(Errc::unsupported, decode_chunk(static_cast<Encoding>(9), {}, plain));
}

// The published values for the empty input: another
// seed or byte order would make every existing image unreadable.
void hashes_are_xxh3() {
    const std::array<unsigned char, 16> empty128{0x99, 0xaa, 0x06, 0xd3, 0x01, 0x47, 0x98, 0xd8,
                                                 0x60, 0x01, 0xc3, 0x24, 0x46, 0x8d, 0x49, 0x7f};
    const Id hash = hash128({});
    for (std::size_t i = 0; i < hash.size(); ++i)
        CHECK(hash[i] == static_cast<std::byte>(empty128[i]));
    CHECK(hash64({}) == 0x2d06800538d394c2ULL);
}

} // namespace

int main() {
    each_kind_of_content_gets_its_encoding();
    decoding_gives_back_what_was_encoded();
    raw_bytes_may_overlap_what_they_decode_to();
    lz4_is_kept_only_if_it_saves_a_sixteenth();
    one_set_bit_anywhere_is_not_zero();
    sizes_out_of_range_are_refused();
    every_truncation_is_reported();
    stored_bytes_that_disagree_with_the_size_are_reported();
    hashes_are_xxh3();
}
