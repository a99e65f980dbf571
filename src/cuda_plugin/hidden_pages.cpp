// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/hidden_pages.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string>

namespace gpustasis {
namespace {

// Where criu's calls find it: ioctl() has no place for it.
std::atomic<HiddenPages*> living = nullptr;
// Not by name: in a test, this is the main program itself.
using Ioctl = int (*)(int, unsigned long, ...);
std::atomic<Ioctl> real_ioctl = nullptr;

std::uint64_t end_of(const PageRange& range) noexcept {
    return range.address + range.length;
}

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

void HiddenPages::hide(pid_t pid, const std::vector<Region>& regions) {
    const std::string path = "/proc/" + std::to_string(pid) + "/pagemap";
    Task task{.pid = pid,
              .pagemap = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC)),
              .ranges = {},
              .told_until = {},
              .answered = {}};
    struct stat status {};
    if (!task.pagemap || ::fstat(task.pagemap.get(), &status) != 0)
        throw io_error("cannot open " + path, errno);
    task.device = status.st_dev;
    task.inode = status.st_ino;
    for (const Region& region : regions) {
        task.ranges.push_back({region.address, region.length});
        task.told_until.push_back(region.address);
        task.answered.wanted += region.length;
    }
    tasks_.push_back(std::move(task));
}

HiddenPages::Answered HiddenPages::answered(pid_t pid) const {
    const auto found = std::ranges::find(tasks_, pid, &Task::pid);
    return found == tasks_.end() ? Answered{} : found->answered;
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
    auto hidden = std::ranges::upper_bound(task.ranges, asked.start, {}, end_of);
    if (hidden == task.ranges.end() || hidden->address >= end)
        return real_ioctl.load()(fd, kPagemapScan, &asked);
    PageScanArguments part = asked;
    auto* regions = reinterpret_cast<ScannedRegion*>(asked.vec);
    std::uint64_t used = 0;
    std::uint64_t pages_bytes = 0;
    std::uint64_t at = asked.start;
    const auto is_full = [&] {
        return used == asked.vec_len ||
               (asked.max_pages != 0 && pages_bytes / page >= asked.max_pages);
    };
    while (at < end) {
        while (hidden != task.ranges.end() && end_of(*hidden) <= at)
            ++hidden;
        if (hidden != task.ranges.end() && hidden->address <= at) {
            const std::uint64_t behind = std::min(end, end_of(*hidden));
            // CRIU asks in ascending order, and for some parts again.
            std::uint64_t& told_until =
                task.told_until[static_cast<std::size_t>(hidden - task.ranges.begin())];
            if (behind > told_until)
                task.answered.hidden += behind - std::max(at, told_until);
            told_until = std::max(told_until, behind);
            at = behind;
            continue;
        }
        if (is_full())
            break;
        part.start = at;
        part.end = hidden == task.ranges.end() ? end : std::min(end, hidden->address);
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
    ++task.answered.scans;
    return static_cast<int>(used);
}

} // namespace gpustasis
