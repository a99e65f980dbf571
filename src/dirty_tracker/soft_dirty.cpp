// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/soft_dirty.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstring>

namespace gpustasis {
namespace {

constexpr std::size_t kEntries = 64U << 10; // pages looked at with one read
constexpr char kClearSoftDirty = '4';       // Documentation/admin-guide/mm/soft-dirty.rst

std::uint64_t page_size() {
    return static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
}

std::uint64_t count_populated(std::span<const PagemapEntry> entries) {
    return static_cast<std::uint64_t>(
        std::ranges::count_if(entries, [](PagemapEntry entry) { return entry.populated(true); }));
}

} // namespace

void read_pagemap(int pagemap, std::uint64_t address, std::span<PagemapEntry> entries) {
    const auto page_size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    auto out = std::as_writable_bytes(entries);
    std::uint64_t offset = address / page_size * sizeof(PagemapEntry);
    while (!out.empty()) {
        const ssize_t got = ::pread(pagemap, out.data(), out.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            throw io_error("cannot read /proc/PID/pagemap", errno);
        if (got == 0) {
            std::ranges::fill(out, std::byte{0});
            return;
        }
        offset += static_cast<std::uint64_t>(got);
        out = out.subspan(static_cast<std::size_t>(got));
    }
}

void add_soft_dirty(DirtyPages& pages, std::uint64_t address, bool shared,
                    std::span<const PagemapEntry> entries, std::uint64_t page_size) {
    for (const PagemapEntry entry : entries) {
        if (entry.populated(shared)) {
            pages.tracked_bytes += page_size;
            if (entry.soft_dirty())
                pages.add(address, page_size);
        }
        address += page_size;
    }
}

SoftDirty::SoftDirty(pid_t pid) : space_(pid), entries_(kEntries) {
    if (const std::string reason = why_not(); !reason.empty())
        throw Error(Errc::unsupported, reason);
    const std::string path = "/proc/" + std::to_string(pid) + "/clear_refs";
    clear_refs_ = UniqueFd(::open(path.c_str(), O_WRONLY | O_CLOEXEC));
    if (!clear_refs_)
        throw io_error("cannot open " + path, errno);
    space_.require_alive();
}

void SoftDirty::mark() {
    static_cast<void>(space_.mappings()); // the program whose bits are cleared is still that one
    if (::write(clear_refs_.get(), &kClearSoftDirty, 1) != 1) {
        const int error = errno;
        space_.require_alive();
        throw io_error("/proc/PID/clear_refs of process " + std::to_string(space_.pid()), error);
    }
}

DirtyPages SoftDirty::scan(bool remark) {
    const std::uint64_t size = page_size();
    DirtyPages pages;
    for (const Mapping& mapping : space_.mappings()) {
        const MappingUse use = use_of(mapping);
        if (use == MappingUse::ignored)
            continue;
        for (std::uint64_t at = mapping.start; at < mapping.end;) {
            const std::span entries(entries_.data(),
                                    std::min<std::uint64_t>(kEntries, (mapping.end - at) / size));
            read_pagemap(space_.pagemap(), at, entries);
            if (use == MappingUse::untracked)
                pages.untracked_bytes += count_populated(entries) * size;
            else
                add_soft_dirty(pages, at, mapping.shared, entries, size);
            at += entries.size() * size;
        }
    }
    if (remark)
        mark();
    space_.require_alive();
    return pages;
}

std::string SoftDirty::why_not() {
    const std::uint64_t size = page_size();
    const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    if (!pagemap)
        return std::string("cannot open /proc/self/pagemap: ") + std::strerror(errno);
    void* page = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (page == MAP_FAILED)
        return "no memory to try it with";
    *static_cast<volatile char*>(page) = 1;
    std::array<PagemapEntry, 1> entry;
    std::string reason;
    try {
        read_pagemap(pagemap.get(), reinterpret_cast<std::uint64_t>(page), entry);
        if (!entry[0].present())
            reason = "/proc/self/pagemap does not show a page that is there";
        else if (!entry[0].soft_dirty())
            reason = "a page just written has no soft-dirty bit: this kernel was built without "
                     "CONFIG_MEM_SOFT_DIRTY";
    } catch (const Error& e) {
        reason = e.what();
    }
    ::munmap(page, size);
    return reason;
}

} // namespace gpustasis
