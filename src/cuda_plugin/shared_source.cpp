// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/shared_source.hpp"

#include "core/file.hpp"

#include <algorithm>

namespace gpustasis {

void SharedSource::read(std::uint64_t address, MutBytes out) {
    const auto part = std::ranges::upper_bound(parts_, address, {}, [](const SharedPart& one) {
        return one.region.address + one.region.length;
    });
    if (part == parts_.end() || address < part->region.address) {
        ProcessMemory::read(address, out);
        return;
    }
    read_at(files_.at(part->file).fd.get(), part->offset + (address - part->region.address), out);
}

} // namespace gpustasis
