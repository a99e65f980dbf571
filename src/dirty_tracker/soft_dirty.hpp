// SPDX-License-Identifier: Apache-2.0
/// Writes seen by the soft-dirty bits of page tables (CONFIG_MEM_SOFT_DIRTY).
#pragma once

#include "dirty_tracker/address_space.hpp"
#include "dirty_tracker/dirty_method.hpp"
#include "dirty_tracker/pagemap.hpp"

#include <string>
#include <vector>

namespace gpustasis {

/// The bits belong to the process, not to who looks at them: clearing them at a mark is seen by
/// any other user of them, such as `criu dump --track-mem`.
class SoftDirty : public DirtyMethod {
public:
    /// Throws Error: unsupported if the bits are not there, gone, bad_argument, io.
    explicit SoftDirty(pid_t pid);

    void mark() override;
    DirtyPages scan(bool remark) override;

    /// Empty if it works here, else why not.
    static std::string why_not();

private:
    AddressSpace space_;
    UniqueFd clear_refs_;
    std::vector<PagemapEntry> entries_;
};

/// Adds to `pages` what `entries`, those of the pages of a mapping from `address` on, say.
void add_soft_dirty(DirtyPages& pages, std::uint64_t address, bool shared,
                    std::span<const PagemapEntry> entries, std::uint64_t page_size);

} // namespace gpustasis
