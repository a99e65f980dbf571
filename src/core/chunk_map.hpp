// SPDX-License-Identifier: Apache-2.0
/// Which chunk lies where in memory.
#pragma once

#include "core/image_info.hpp"

#include <cstdint>
#include <vector>

namespace gpustasis {

/// The memory one chunk holds.
struct ChunkPlace {
    std::uint64_t address = 0;
    std::uint32_t size = 0;
};

/// Numbers the chunks of a list of regions, as docs/format.md says.
class ChunkMap {
public:
    /// `regions` and `chunk_size` have passed format::check_info().
    ChunkMap(const std::vector<Region>& regions, std::uint32_t chunk_size);

    std::uint64_t count() const noexcept { return count_; }
    /// Memory in all chunks, in bytes.
    std::uint64_t plain_size() const noexcept { return plain_size_; }
    /// `index` is less than count().
    ChunkPlace at(std::uint64_t index) const noexcept;

private:
    struct Run {
        std::uint64_t first = 0; ///< number of the region's first chunk
        std::uint64_t address = 0;
        std::uint64_t length = 0;
    };
    std::vector<Run> runs_;
    std::uint32_t chunk_size_;
    std::uint64_t count_ = 0;
    std::uint64_t plain_size_ = 0;
};

} // namespace gpustasis
