// SPDX-License-Identifier: Apache-2.0
#include "tracee/page_scan.hpp"

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

namespace gpustasis {
namespace {

constexpr std::uint64_t kScanProtect = 1U << 0;        // PM_SCAN_WP_MATCHING
constexpr std::uint64_t kScanRegisteredOnly = 1U << 1; // PM_SCAN_CHECK_WPASYNC

} // namespace

PageScanner::PageScanner(int pagemap, std::size_t regions) : pagemap_(pagemap), regions_(regions) {}

bool PageScanner::scan(std::uint64_t start, std::uint64_t end, const PageQuery& query,
                       ScanMode mode, bool registered_only, std::vector<PageRange>& found) {
    PageScanArguments arguments;
    arguments.flags = (mode == ScanMode::protect ? kScanProtect : 0) |
                      (registered_only ? kScanRegisteredOnly : 0);
    arguments.end = end;
    arguments.vec = reinterpret_cast<std::uint64_t>(regions_.data());
    arguments.vec_len = regions_.size();
    arguments.category_inverted = query.inverted;
    arguments.category_mask = query.all_of;
    arguments.category_anyof_mask = query.any_of;
    arguments.return_mask = kPagePresent | kPageSwapped;
    while (start < end) {
        arguments.start = start;
        arguments.walk_end = 0;
        const int count = ::ioctl(pagemap_, kPagemapScan, &arguments);
        const int error = errno;
        if (count < 0 && error == EINTR)
            continue; // nothing was done: it is only returned before a walk
        if (count < 0 && error != EPERM)
            throw io_error("PAGEMAP_SCAN", error);
        // A walk that meets what is not registered gives an error and no count, and may have
        // protected pages before: the array, which was zero, tells.
        std::size_t used = 0;
        for (; used < regions_.size() && regions_[used].end != 0; ++used) {
            found.push_back({regions_[used].start, regions_[used].end - regions_[used].start});
            regions_[used] = {};
        }
        if (count < 0)
            return false;
        start = arguments.walk_end;
    }
    return true;
}

std::string why_no_page_scan() {
    const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    if (!pagemap)
        return std::string("cannot open /proc/self/pagemap: ") + std::strerror(errno);
    PageScanArguments nothing;
    if (::ioctl(pagemap.get(), kPagemapScan, &nothing) >= 0)
        return {};
    if (errno == ENOTTY)
        return "this kernel has no PAGEMAP_SCAN (Linux 6.7 and later have)";
    return std::string("PAGEMAP_SCAN: ") + std::strerror(errno);
}

} // namespace gpustasis
