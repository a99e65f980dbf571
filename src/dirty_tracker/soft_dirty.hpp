// SPDX-License-Identifier: Apache-2.0
/// Writes seen by the soft-dirty bits of page tables (CONFIG_MEM_SOFT_DIRTY).
#pragma once

#include "dirty_tracker/address_space.hpp"
#include "dirty_tracker/dirty_pages.hpp"
#include "tracee/task_maps.hpp"

#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace gpustasis {

/// One page in /proc/PID/pagemap, 64 bits (Documentation/admin-guide/mm/pagemap.rst).
struct PagemapEntry {
    std::uint64_t bits = 0;

    bool present() const noexcept { return (bits >> 63 & 1) != 0; }
    bool swapped() const noexcept { return (bits >> 62 & 1) != 0; }
    /// Of a file, or of shared memory.
    bool file() const noexcept { return (bits >> 61 & 1) != 0; }
    bool soft_dirty() const noexcept { return (bits >> 55 & 1) != 0; }

    /// Whether the page, in a private or a shared mapping, holds something of the process's own.
    bool populated(bool shared) const noexcept {
        return (present() || swapped()) && (shared || !file());
    }
};
static_assert(sizeof(PagemapEntry) == 8);

/// Fill `entries` with those of the pages from `address` on. Fewer are there at the end of the
/// address space: the rest is zero. Throws Error: io.
void read_pagemap(int pagemap, std::uint64_t address, std::span<PagemapEntry> entries);

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
