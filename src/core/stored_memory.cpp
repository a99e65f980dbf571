// SPDX-License-Identifier: Apache-2.0
#include "core/stored_memory.hpp"

#include "core/fields.hpp"
#include "core/hash.hpp"

namespace gpustasis {
namespace {

constexpr std::size_t kEntrySize = 24;
constexpr std::size_t kEntryReserved = 2;
constexpr std::size_t kRegionSize = 16;

Id hash_regions(const std::vector<Region>& regions) {
    FieldWriter out(kRegionSize * regions.size());
    for (const Region& region : regions) {
        out.number(region.address);
        out.number(region.length);
    }
    return hash128(out.bytes());
}

} // namespace

void StoredMemory::add(const ManifestTask& task, const std::vector<Region>& regions) {
    entries_[{task.pid, task.kind}] = {.externalized = task.externalized,
                                       .regions = task.externalized ? hash_regions(regions) : Id{}};
}

Id StoredMemory::digest() const {
    FieldWriter out(kEntrySize * entries_.size());
    for (const auto& [place, entry] : entries_) {
        out.number(place.first);
        out.number(static_cast<std::uint8_t>(place.second));
        out.number(static_cast<std::uint8_t>(entry.externalized));
        out.reserved(kEntryReserved);
        out.append(entry.regions);
    }
    return hash128(out.bytes());
}

} // namespace gpustasis
