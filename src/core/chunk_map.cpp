// SPDX-License-Identifier: Apache-2.0
#include "core/chunk_map.hpp"

#include <algorithm>

namespace gpustasis {

ChunkMap::ChunkMap(const std::vector<Region>& regions, std::uint32_t chunk_size)
    : chunk_size_(chunk_size) {
    runs_.reserve(regions.size());
    for (const Region& region : regions) {
        runs_.push_back({count_, region.address, region.length});
        count_ += (region.length + chunk_size - 1) / chunk_size;
        plain_size_ += region.length;
    }
}

ChunkPlace ChunkMap::at(std::uint64_t index) const noexcept {
    const auto after = std::ranges::upper_bound(runs_, index, {}, &Run::first);
    const Run& run = *(after - 1);
    const std::uint64_t offset = (index - run.first) * chunk_size_;
    const std::uint64_t left = run.length - offset;
    return {run.address + offset,
            static_cast<std::uint32_t>(std::min<std::uint64_t>(left, chunk_size_))};
}

} // namespace gpustasis
