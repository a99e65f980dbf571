// SPDX-License-Identifier: Apache-2.0
/// Encode and decode one chunk of memory, and count how chunks are stored. Knows nothing of files or
/// processes.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>
#include <cstdint>

namespace gpustasis {

/// How one chunk is stored; docs/format.md, field encoding. Permanent: never renumber.
enum class Encoding : std::uint8_t { zero = 0, lz4 = 1, raw = 2 };

/// Whether the file holds other bytes than the memory: these have a checksum of their own, and need
/// a buffer of their own.
constexpr bool is_packed(Encoding encoding) noexcept {
    return encoding != Encoding::zero && encoding != Encoding::raw;
}

inline constexpr std::uint32_t kMinChunkSize = 4U << 10;
inline constexpr std::uint32_t kMaxChunkSize = 4U << 20;
inline constexpr std::uint32_t kDefaultChunkSize = 256U << 10;

/// The largest `lz4_acceleration` that LZ4_compress_fast distinguishes.
inline constexpr int kMaxAcceleration = 65537;

/// What encode_chunk() chose. `stored` lies in `scratch` (lz4), is `plain` itself (raw), or is
/// empty (zero).
struct EncodedChunk {
    Encoding encoding = Encoding::zero;
    Bytes stored;
};

/// True if every byte is zero; true for no bytes. Runs at memory speed.
bool is_zero(Bytes bytes) noexcept;

/// The most bytes that an lz4 chunk of `plain_size` bytes is given; more are not worth it, and
/// the chunk is stored raw.
constexpr std::size_t lz4_limit(std::size_t plain_size) noexcept {
    return plain_size - plain_size / 16;
}

/// Encode `plain` (1..kMaxChunkSize bytes) as docs/format.md says a writer chooses. `scratch`
/// holds at least lz4_limit(plain.size()) bytes if `compress`, and must outlive the result.
/// `lz4_acceleration` is 1..kMaxAcceleration; higher is faster and compresses less.
/// Throws Error: bad_argument if a size or number is out of range.
EncodedChunk encode_chunk(Bytes plain, bool compress, int lz4_acceleration, MutBytes scratch);

/// Decode `stored` into `plain`, filling it exactly. Safe on hostile input: never writes outside
/// `plain`, whatever `stored` holds.
/// Throws Error: corrupt_data if it does not decode to exactly that size, unsupported if
/// `encoding` is unknown.
void decode_chunk(Encoding encoding, Bytes stored, MutBytes plain);

/// Which image has the stored bytes of a chunk.
enum class Holder : std::uint8_t {
    own,     ///< the one that the chunk is of
    alike,   ///< another one of the same checkpoint
    earlier, ///< one of an earlier checkpoint
};

/// Chunks and bytes by how they are stored. `plain` counts memory, `stored` the bytes of the file
/// that hold it.
struct EncodingTotals {
    struct Count {
        std::uint64_t chunks = 0;
        std::uint64_t plain = 0;
        std::uint64_t stored = 0;

        bool operator==(const Count&) const = default;
    };
    Count zero, lz4, raw;
    Count ref;   ///< in the image of an earlier checkpoint, however it is stored there
    Count alike; ///< the same of another image of the checkpoint

    /// Count one chunk more. `stored_size` counts only if the image itself holds it.
    void add(Encoding encoding, Holder holder, std::uint64_t plain_size,
             std::uint64_t stored_size) noexcept;
    EncodingTotals& operator+=(const EncodingTotals& other) noexcept;
    bool operator==(const EncodingTotals&) const = default;
};

} // namespace gpustasis
