// SPDX-License-Identifier: Apache-2.0
#include "core/chunk_codec.hpp"

#include "core/error.hpp"

#include <lz4.h>

#include <algorithm>
#include <cstring>
#include <string>

namespace gpustasis {
namespace {

const char* chars(Bytes bytes) noexcept {
    return reinterpret_cast<const char*>(bytes.data());
}
char* chars(MutBytes bytes) noexcept {
    return reinterpret_cast<char*>(bytes.data());
}

} // namespace

bool is_zero(Bytes bytes) noexcept {
    // Most memory that is not zero shows it in its first bytes: look there before scanning.
    constexpr std::size_t kPeek = 64;
    const auto not_zero = [](std::byte byte) { return byte != std::byte{0}; };
    if (std::ranges::any_of(bytes.first(std::min(kPeek, bytes.size())), not_zero))
        return false;
    // Comparing the bytes with themselves, shifted by kPeek known zeros, lets memcmp's vector code
    // do the scan.
    return bytes.size() <= kPeek ||
           std::memcmp(bytes.data(), bytes.data() + kPeek, bytes.size() - kPeek) == 0;
}

EncodedChunk encode_chunk(Bytes plain, bool compress, int lz4_acceleration, MutBytes scratch) {
    if (plain.empty() || plain.size() > kMaxChunkSize)
        throw Error(Errc::bad_argument, "chunk size out of range: " + std::to_string(plain.size()));
    if (lz4_acceleration < 1 || lz4_acceleration > kMaxAcceleration)
        throw Error(Errc::bad_argument,
                    "lz4 acceleration out of range: " + std::to_string(lz4_acceleration));

    if (is_zero(plain))
        return {Encoding::zero, {}};
    if (!compress)
        return {Encoding::raw, plain};

    const std::size_t limit = lz4_limit(plain.size());
    if (scratch.size() < limit)
        throw Error(Errc::bad_argument, "scratch is smaller than lz4_limit()");
    // Given no more room than the limit, LZ4 stops as soon as it cannot keep it.
    const int written =
        LZ4_compress_fast(chars(plain), chars(scratch), static_cast<int>(plain.size()),
                          static_cast<int>(limit), lz4_acceleration);
    // A chunk of less than 16 bytes has a limit of its own size, which the reader does not allow.
    if (written <= 0 || static_cast<std::size_t>(written) >= plain.size())
        return {Encoding::raw, plain};
    return {Encoding::lz4, scratch.first(static_cast<std::size_t>(written))};
}

void decode_chunk(Encoding encoding, Bytes stored, MutBytes plain) {
    if (plain.size() > kMaxChunkSize || stored.size() > kMaxChunkSize)
        throw Error(Errc::corrupt_data, "chunk is larger than any can be");
    switch (encoding) {
    case Encoding::zero:
        if (!stored.empty())
            throw Error(Errc::corrupt_data, "zero chunk has stored bytes");
        std::ranges::fill(plain, std::byte{0});
        return;
    case Encoding::raw:
        if (stored.size() != plain.size())
            throw Error(Errc::corrupt_data, "raw chunk has the wrong size");
        if (!stored.empty()) // not copy_bytes(): buffers of Python may overlap
            std::memmove(plain.data(), stored.data(), stored.size());
        return;
    case Encoding::lz4: {
        const int decoded =
            LZ4_decompress_safe(chars(stored), chars(plain), static_cast<int>(stored.size()),
                                static_cast<int>(plain.size()));
        if (decoded < 0 || static_cast<std::size_t>(decoded) != plain.size())
            throw Error(Errc::corrupt_data, "lz4 chunk does not decode to its size");
        return;
    }
    }
    throw Error(Errc::unsupported,
                "cannot decode encoding " + std::to_string(static_cast<int>(encoding)));
}

void EncodingTotals::add(Encoding encoding, Holder holder, std::uint64_t plain_size,
                         std::uint64_t stored_size) noexcept {
    const auto count = [&](Count& of) {
        ++of.chunks;
        of.plain += plain_size;
        of.stored += holder == Holder::own ? stored_size : 0;
    };
    if (holder != Holder::own)
        return count(holder == Holder::alike ? alike : ref);
    switch (encoding) {
    case Encoding::zero: return count(zero);
    case Encoding::lz4: return count(lz4);
    case Encoding::raw: return count(raw);
    }
}

EncodingTotals& EncodingTotals::operator+=(const EncodingTotals& other) noexcept {
    const auto sum = [](Count& to, const Count& from) {
        to.chunks += from.chunks;
        to.plain += from.plain;
        to.stored += from.stored;
    };
    sum(zero, other.zero);
    sum(lz4, other.lz4);
    sum(raw, other.raw);
    sum(ref, other.ref);
    sum(alike, other.alike);
    return *this;
}

} // namespace gpustasis
