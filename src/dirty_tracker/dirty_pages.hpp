// SPDX-License-Identifier: Apache-2.0
/// What a scan of a process's memory finds, and what every way of scanning can do.
#pragma once

#include "tracee/page_scan.hpp"

#include <cstdint>
#include <vector>

namespace gpustasis {

/// How writes are seen.
enum class DirtyBackend {
    soft_dirty,    ///< /proc/PID/clear_refs and bit 55 of /proc/PID/pagemap
    write_protect, ///< userfaultfd in asynchronous write-protect mode, and PAGEMAP_SCAN
};

/// "soft-dirty" or "write-protect".
const char* name_of(DirtyBackend backend) noexcept;

/// Bytes are those of pages that hold something: in memory or in swap, and neither the kernel's
/// zero page nor, in a private mapping of a file, a page of that file.
struct DirtyPages {
    DirtyBackend backend = DirtyBackend::write_protect;
    std::vector<PageRange> ranges;     ///< written since the mark; ascending, none touches the next
    std::uint64_t dirty_bytes = 0;     ///< of `ranges`
    std::uint64_t tracked_bytes = 0;   ///< written or not
    std::uint64_t untracked_bytes = 0; ///< in writable mappings whose writes cannot be seen

    /// Appends [address, address + length), which does not begin before the last one. What is in
    /// it already is not counted twice.
    void add(std::uint64_t address, std::uint64_t length);
};

class DirtyMethod {
public:
    DirtyMethod() = default;
    DirtyMethod(const DirtyMethod&) = delete;
    DirtyMethod& operator=(const DirtyMethod&) = delete;
    virtual ~DirtyMethod() = default;

    /// As DirtyTracker::mark() and scan(); `backend` of the result is the caller's to set.
    virtual void mark() = 0;
    virtual DirtyPages scan(bool remark) = 0;
};

} // namespace gpustasis
