// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/address_ranges.hpp"

#include <algorithm>

namespace gpustasis {

std::vector<AddressRange> join(std::vector<AddressRange> ranges) {
    std::ranges::sort(ranges, {}, &AddressRange::start);
    std::vector<AddressRange> joined;
    for (const AddressRange& range : ranges) {
        if (!joined.empty() && range.start <= joined.back().end)
            joined.back().end = std::max(joined.back().end, range.end);
        else
            joined.push_back(range);
    }
    return joined;
}

std::vector<AddressRange> parts_outside(const AddressRange& run,
                                        const std::vector<AddressRange>& left, std::uint64_t block,
                                        std::uint64_t least) {
    std::vector<AddressRange> parts;
    std::uint64_t at = run.start;
    const auto append = [&](std::uint64_t until) {
        const std::uint64_t first = (at + block - 1) / block * block;
        const std::uint64_t last = until / block * block;
        if (last > first && last - first >= least)
            parts.push_back({first, last});
    };
    for (auto range = std::ranges::upper_bound(left, at, {}, &AddressRange::end);
         range != left.end() && range->start < run.end; ++range) {
        append(range->start);
        at = std::max(at, range->end);
    }
    append(run.end);
    return parts;
}

} // namespace gpustasis
