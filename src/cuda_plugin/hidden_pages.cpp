// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/hidden_pages.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

// Where criu's calls find it: ioctl() has no place for it.
std::atomic<HiddenPages*> living = nullptr;
// Not by name: in a test, this is the main program itself.
using Ioctl = int (*)(int, unsigned long, ...);
std::atomic<Ioctl> real_ioctl = nullptr;

std::uint64_t page_size() noexcept {
    return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

/// Other sizes are of kernels to come, flags ask for more than an answer, what is wrong the kernel says, and
/// CRIU asks about guard pages too, which are none of what is hidden.
bool asks_what_is_there(const PageScanArguments& asked) noexcept {
    return asked.size == sizeof asked && asked.flags == 0 && asked.vec_len != 0 &&
           asked.start < asked.end && asked.start % page_size() == 0 &&
           ((asked.category_mask | asked.category_anyof_mask) & kPagePresent) != 0;
}

/// The function to take the place of.
const char* require_page_scan() {
    if (const std::string why_not = why_no_page_scan(); !why_not.empty())
        throw Error(Errc::unsupported, why_not);
    real_ioctl = reinterpret_cast<Ioctl>(ImportSlot::find_imported("ioctl"));
    return "ioctl";
}

} // namespace

HiddenPages::HiddenPages()
    : slot_(require_page_scan(), reinterpret_cast<void*>(&HiddenPages::ioctl_of_criu)) {
    living = this;
}

HiddenPages::~HiddenPages() {
    living = nullptr;
}

void HiddenPages::hide(pid_t pid, MemoryKind kind, const std::vector<Region>& regions) {
    const std::string path = "/proc/" + std::to_string(pid) + "/pagemap";
    Task task{.pid = pid, .pagemap = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC))};
    struct stat status {};
    if (!task.pagemap || ::fstat(task.pagemap.get(), &status) != 0)
        throw io_error("cannot open " + path, errno);
    task.device = status.st_dev;
    task.inode = status.st_ino;
    Task* const known = task_of(task.pagemap.get());
    if (known != nullptr) {
        task.ranges = known->ranges;
        task.scans = known->scans;
    }
    for (const Region& region : regions)
        task.ranges.push_back({.start = region.address,
                               .end = region.address + region.length,
                               .kind = kind,
                               .told_until = region.address});
    std::ranges::sort(task.ranges, {}, &Range::start);
    if (known != nullptr)
        *known = std::move(task);
    else
        tasks_.push_back(std::move(task));
}

HiddenPages::Answered HiddenPages::answered(pid_t pid, MemoryKind kind) const {
    Answered answered;
    const auto found = std::ranges::find(tasks_, pid, &Task::pid);
    if (found == tasks_.end())
        return answered;
    answered.scans = found->scans.at(place_of(kind));
    for (const Range& range : found->ranges)
        if (range.kind == kind) {
            answered.wanted += range.end - range.start;
            answered.hidden += range.told;
        }
    return answered;
}

// As the C library's: what it has behind the request, if anything, is in the third register.
int HiddenPages::ioctl_of_criu(int fd, unsigned long request, void* argument) noexcept {
    HiddenPages* self = living;
    if (self == nullptr || request != kPagemapScan || argument == nullptr)
        return real_ioctl.load()(fd, request, argument);
    auto& asked = *static_cast<PageScanArguments*>(argument);
    Task* task = nullptr;
    if (asks_what_is_there(asked))
        task = self->task_of(fd);
    if (task == nullptr)
        return real_ioctl.load()(fd, request, argument);
    return scan_around(fd, asked, *task);
}

HiddenPages::Task* HiddenPages::task_of(int fd) noexcept {
    const int error = errno;
    struct stat status {};
    const bool known = ::fstat(fd, &status) == 0;
    errno = error;
    const auto found = std::ranges::find_if(tasks_, [&](const Task& task) {
        return known && task.device == status.st_dev && task.inode == status.st_ino;
    });
    return found == tasks_.end() ? nullptr : &*found;
}

// The kernel is asked for the parts between the hidden ranges, one after the other, into the caller's own
// array. They do not touch, so no region of one belongs to one of the next.
int HiddenPages::scan_around(int fd, PageScanArguments& asked, Task& task) noexcept {
    const std::uint64_t page = page_size();
    const std::uint64_t end = (asked.end + page - 1) / page * page;
    auto hidden = std::ranges::upper_bound(task.ranges, asked.start, {}, &Range::end);
    if (hidden == task.ranges.end() || hidden->start >= end)
        return real_ioctl.load()(fd, kPagemapScan, &asked);
    PageScanArguments part = asked;
    auto* regions = reinterpret_cast<ScannedRegion*>(asked.vec);
    std::uint64_t used = 0;
    std::uint64_t pages_bytes = 0;
    std::uint64_t at = asked.start;
    std::array<std::uint64_t, 2> lacking{}; // as Task::scans
    const auto is_full = [&] {
        return used == asked.vec_len ||
               (asked.max_pages != 0 && pages_bytes / page >= asked.max_pages);
    };
    while (at < end) {
        while (hidden != task.ranges.end() && hidden->end <= at)
            ++hidden;
        if (hidden != task.ranges.end() && hidden->start <= at) {
            // CRIU asks in ascending order, and for some parts again.
            const std::uint64_t behind = std::min(end, hidden->end);
            if (behind > hidden->told_until)
                hidden->told += behind - std::max(at, hidden->told_until);
            hidden->told_until = std::max(hidden->told_until, behind);
            lacking[place_of(hidden->kind)] = 1;
            at = behind;
            continue;
        }
        if (is_full())
            break;
        part.start = at;
        part.end = hidden == task.ranges.end() ? end : std::min(end, hidden->start);
        part.walk_end = 0;
        part.vec = asked.vec + used * sizeof(ScannedRegion);
        part.vec_len = asked.vec_len - used;
        part.max_pages = asked.max_pages == 0 ? 0 : asked.max_pages - pages_bytes / page;
        const int count = real_ioctl.load()(fd, kPagemapScan, &part);
        if (count < 0) {
            asked.walk_end = part.walk_end;
            return count;
        }
        for (std::uint64_t i = used; i < used + static_cast<std::uint64_t>(count); ++i)
            pages_bytes += regions[i].end - regions[i].start;
        used += static_cast<std::uint64_t>(count);
        at = part.walk_end;
        if (at < part.end)
            break;
    }
    asked.walk_end = at;
    for (std::size_t kind = 0; kind < lacking.size(); ++kind)
        task.scans[kind] += lacking[kind];
    return static_cast<int>(used);
}

} // namespace gpustasis
