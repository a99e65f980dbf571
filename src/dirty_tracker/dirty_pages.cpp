// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/dirty_pages.hpp"

#include <algorithm>

namespace gpustasis {

const char* name_of(DirtyBackend backend) noexcept {
    return backend == DirtyBackend::soft_dirty ? "soft-dirty" : "write-protect";
}

void DirtyPages::add(std::uint64_t address, std::uint64_t length) {
    if (ranges.empty() || ranges.back().address + ranges.back().length < address) {
        ranges.push_back({address, length});
        dirty_bytes += length;
        return;
    }
    PageRange& last = ranges.back();
    const std::uint64_t end = std::max(last.address + last.length, address + length);
    dirty_bytes += end - (last.address + last.length);
    last.length = end - last.address;
}

} // namespace gpustasis
