// SPDX-License-Identifier: Apache-2.0
/// How much of an image is stored in which way.
#pragma once

#include "core/chunk_codec.hpp"

#include <cstdint>

namespace gpustasis {

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
    Count ref; ///< in the image of an earlier checkpoint, however it is stored there

    /// Count one chunk more. `reference`: this image stores nothing of it.
    void add(Encoding encoding, bool reference, std::uint64_t plain_size,
             std::uint64_t stored_size) noexcept;
    EncodingTotals& operator+=(const EncodingTotals& other) noexcept;
    bool operator==(const EncodingTotals&) const = default;
};

} // namespace gpustasis
