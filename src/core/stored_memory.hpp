// SPDX-License-Identifier: Apache-2.0
/// Which memory of a tree lies in images of ours. CRIU's inventory holds a digest of it, so that a
/// restore that would fill less is refused before it begins.
#pragma once

#include "core/image_info.hpp"
#include "core/manifest.hpp"

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

namespace gpustasis {

class StoredMemory {
public:
    /// An entry of the manifest, and the regions of its image; of one without an image none count.
    void add(const ManifestTask& task, const std::vector<Region>& regions);

    /// Of all that was added, in whatever order, by docs/format.md, "What CRIU's inventory says".
    /// It depends on tasks, kinds and regions, and not on how an image holds them.
    Id digest() const;

private:
    struct Entry {
        bool externalized = false;
        Id regions{}; ///< hash of their addresses and lengths
    };
    std::map<std::pair<std::uint32_t, MemoryKind>, Entry> entries_; ///< by pid and kind
};

} // namespace gpustasis
