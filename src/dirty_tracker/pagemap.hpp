// SPDX-License-Identifier: Apache-2.0
/// Entries of /proc/PID/pagemap. Source: Documentation/admin-guide/mm/pagemap.rst.
#pragma once

#include "tracee/task_maps.hpp"

#include <cstdint>
#include <span>

namespace gpustasis {

/// One page, 64 bits.
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

} // namespace gpustasis
