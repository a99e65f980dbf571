// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/write_protect.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <iterator>
#include <string>
#include <vector>

namespace gpustasis {
namespace {

// A mapping may change while it is looked at; what changes more often than this is left for the
// next scan, in which its pages count as written.
constexpr int kMaxTries = 4;

/// Pages that hold something of the process's own. Without any_of the kernel would also protect
/// pages that are not there, with page tables to remember it: memory of the process's.
PageQuery populated(const Mapping& mapping) {
    PageQuery query;
    query.inverted = kPageZero;
    // Where there is no file the kernel need not look at each page's own record.
    if (!mapping.shared && mapping.inode != 0)
        query.inverted |= kPageFile;
    query.all_of = query.inverted;
    query.any_of = kPagePresent | kPageSwapped;
    return query;
}

PageQuery written(const Mapping& mapping) {
    PageQuery query = populated(mapping);
    query.all_of |= kPageWritten;
    return query;
}

} // namespace

WriteProtect::WriteProtect(pid_t pid)
    : space_(pid), userfault_(space_), scanner_(space_.pagemap()) {}

WriteProtect::~WriteProtect() {
    // The kernel would do it at the last close. But a child that the process forked in the very
    // moment the descriptor was made in it has one too.
    // Only what is ours: before Linux 6.17 the kernel takes the word of any userfaultfd for the
    // memory of any other, and another one may stand guard over memory that is missing.
    try {
        if (!may_take())
            return; // it is let go of by the kernel, then
        for (const Mapping& mapping : space_.mappings())
            for (auto at = first_of(mapping.start); at != ours_.end() && at->first < mapping.end;
                 ++at)
                give_up(std::max(at->first, mapping.start), std::min(at->second, mapping.end));
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): it has ended, and all is gone
    }
}

std::map<std::uint64_t, std::uint64_t>::iterator WriteProtect::first_of(std::uint64_t start) {
    auto at = ours_.upper_bound(start);
    if (at != ours_.begin() && std::prev(at)->second > start)
        --at;
    return at;
}

bool WriteProtect::may_take() const {
    return space_.pid() == ::getpid() || proc::tracer_of(space_.pid()) == 0;
}

bool WriteProtect::take(std::uint64_t start, std::uint64_t end) {
    if (!userfault_.add(start, end))
        return false;
    auto at = first_of(start);
    if (at != ours_.end() && at->first <= start && end <= at->second)
        return true;
    while (at != ours_.end() && at->first < end) {
        start = std::min(start, at->first);
        end = std::max(end, at->second);
        at = ours_.erase(at);
    }
    ours_.emplace(start, end);
    return true;
}

void WriteProtect::give_up(std::uint64_t start, std::uint64_t end) {
    // What was ours may have been unmapped, and another's be there now: that one is refused to us.
    if (userfault_.add(start, end))
        userfault_.remove(start, end);
}

void WriteProtect::mark() {
    scan(true);
}

DirtyPages WriteProtect::scan(bool remark) {
    try {
        return scan_all(remark);
    } catch (const Error&) {
        static_cast<void>(space_.mappings()); // if it is gone, that is the reason
        throw;
    }
}

DirtyPages WriteProtect::scan_all(bool remark) {
    const ScanMode mode = remark ? ScanMode::protect : ScanMode::look;
    DirtyPages pages;
    std::vector<PageRange> found;
    for (const Mapping& mapping : space_.mappings()) {
        const MappingUse use = use_of(mapping);
        if (use == MappingUse::ignored)
            continue;
        const bool tracked = use != MappingUse::untracked && scan_mapping(mapping, mode, found);
        // Also of a mapping that could be tracked in part only: what was found is protected now.
        std::ranges::sort(found, {}, &PageRange::address);
        for (const PageRange& range : found)
            pages.add(range.address, range.length);
        found.clear();
        if (tracked)
            pages.tracked_bytes += populated_bytes(mapping);
        else if ((mapping.protection & PROT_WRITE) != 0)
            pages.untracked_bytes += populated_bytes(mapping);
    }
    space_.require_alive();
    // What was written since it was counted is in the one and not in the other.
    pages.tracked_bytes = std::max(pages.tracked_bytes, pages.dirty_bytes);
    return pages;
}

bool WriteProtect::scan_mapping(const Mapping& mapping, ScanMode mode,
                                std::vector<PageRange>& found) {
    const PageQuery query = written(mapping);
    for (int attempt = 0; attempt < kMaxTries; ++attempt) {
        // Each time: it may be new, at an address where another one was before. Then none of its
        // pages is protected, and all are found. One that another userfaultfd has is not ours.
        // Nor is what comes while the process is traced: a dump may be about to put memory that it
        // drops behind a userfaultfd, and memory has one at most. What is ours is looked at all the
        // same; of the rest the kernel refuses the scan.
        const bool takes = may_take();
        if (takes && !take(mapping.start, mapping.end))
            return false;
        if (mode == ScanMode::look)
            found.clear();
        if (scanner_.scan(mapping.start, mapping.end, query, mode, true, found))
            return true;
        if (!takes)
            return false;
    }
    return true;
}

std::uint64_t WriteProtect::populated_bytes(const Mapping& mapping) {
    buffer_.clear();
    scanner_.scan(mapping.start, mapping.end, populated(mapping), ScanMode::look, false, buffer_);
    std::uint64_t bytes = 0;
    for (const PageRange& range : buffer_)
        bytes += range.length;
    return bytes;
}

std::string WriteProtect::why_not() {
    if (std::string reason = why_no_page_scan(); !reason.empty())
        return reason;
    const long size = ::sysconf(_SC_PAGESIZE);
    void* page = ::mmap(nullptr, static_cast<std::size_t>(size), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return "no memory to try it with";
    std::string reason;
    try {
        const AddressSpace self(::getpid());
        Userfault userfault(self);
        PageScanner scanner(self.pagemap());
        Mapping mapping;
        mapping.start = reinterpret_cast<std::uint64_t>(page);
        mapping.end = mapping.start + static_cast<std::uint64_t>(size);
        auto* byte = static_cast<volatile char*>(page);
        const auto look = [&] {
            std::vector<PageRange> found;
            scanner.scan(mapping.start, mapping.end, written(mapping), ScanMode::protect, true,
                         found);
            return found.size();
        };
        *byte = 1;
        if (!userfault.add(mapping.start, mapping.end))
            reason = "userfaultfd does not take ordinary memory";
        else if (look() != 1)
            reason = "a page that is there is not found";
        else if (look() != 0)
            reason = "pages are not protected";
        else if (*byte = 2; look() != 1)
            reason = "a page that was written is not found";
    } catch (const Error& e) {
        reason = e.what();
    }
    ::munmap(page, static_cast<std::size_t>(size));
    return reason;
}

} // namespace gpustasis
