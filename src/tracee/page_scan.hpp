// SPDX-License-Identifier: Apache-2.0
/// ioctl(PAGEMAP_SCAN): Linux 6.7. Source of every number: include/uapi/linux/fs.h; the headers
/// of the machine that builds may be older than the kernel that runs.
#pragma once

#include <sys/ioctl.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// struct pm_scan_arg
struct PageScanArguments {
    std::uint64_t size = sizeof(PageScanArguments);
    std::uint64_t flags = 0;
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    std::uint64_t walk_end = 0;
    std::uint64_t vec = 0;
    std::uint64_t vec_len = 0;
    std::uint64_t max_pages = 0;
    std::uint64_t category_inverted = 0;
    std::uint64_t category_mask = 0;
    std::uint64_t category_anyof_mask = 0;
    std::uint64_t return_mask = 0;
};
static_assert(sizeof(PageScanArguments) == 96);

/// struct page_region
struct ScannedRegion {
    std::uint64_t start = 0;
    std::uint64_t end = 0;
    std::uint64_t categories = 0;
};

inline constexpr unsigned long kPagemapScan = _IOWR('f', 16, PageScanArguments);

/// Whole pages of a process.
struct PageRange {
    std::uint64_t address = 0;
    std::uint64_t length = 0; ///< bytes
};

/// Which pages a scan finds.
struct PageQuery {
    std::uint64_t inverted = 0; ///< categories that count as set where they are not
    std::uint64_t all_of = 0;   ///< after inversion
    std::uint64_t any_of = 0;   ///< after inversion; 0: does not matter
};

inline constexpr std::uint64_t kPageWritten = 1U << 1; ///< not write-protected by userfaultfd
inline constexpr std::uint64_t kPageFile = 1U << 2;    ///< of a file or of shared memory
inline constexpr std::uint64_t kPagePresent = 1U << 3;
inline constexpr std::uint64_t kPageSwapped = 1U << 4;
inline constexpr std::uint64_t kPageZero = 1U << 5; ///< the kernel's zero page

/// What to do with pages that are found.
enum class ScanMode {
    look,    ///< nothing
    protect, ///< write-protect each in the same step: it is found again once it has been written
};

class PageScanner {
public:
    /// `pagemap`: a descriptor of /proc/PID/pagemap, which outlives this. `regions`: how many the kernel can tell in
    /// one call; for a small task few are cheaper.
    explicit PageScanner(int pagemap, std::size_t regions = 4096);

    /// Appends the pages of [start, end) that `query` finds. False as soon as a part of it is not
    /// registered with a userfaultfd for asynchronous write-protection and `registered_only`:
    /// what was protected before that point has been appended. Throws Error: io.
    bool scan(std::uint64_t start, std::uint64_t end, const PageQuery& query, ScanMode mode,
              bool registered_only, std::vector<PageRange>& found);

private:
    int pagemap_;
    std::vector<ScannedRegion> regions_;
};

/// Empty if this kernel has PAGEMAP_SCAN, else why it cannot be used.
std::string why_no_page_scan();

} // namespace gpustasis
