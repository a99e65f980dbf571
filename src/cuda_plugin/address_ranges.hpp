// SPDX-License-Identifier: Apache-2.0
/// Runs of addresses, or of offsets in a file, and what is left of them.
#pragma once

#include <cstdint>
#include <vector>

namespace gpustasis {

struct AddressRange {
    std::uint64_t start = 0;
    std::uint64_t end = 0;

    bool operator==(const AddressRange&) const = default;
};

/// The same addresses: ascending, and no two of them touch.
std::vector<AddressRange> join(std::vector<AddressRange> ranges);

/// The parts of `run` outside of `left`, which is as join() gives it, in whole blocks of `block` bytes: those
/// of at least `least` bytes. Ascending.
std::vector<AddressRange> parts_outside(const AddressRange& run,
                                        const std::vector<AddressRange>& left, std::uint64_t block,
                                        std::uint64_t least);

} // namespace gpustasis
