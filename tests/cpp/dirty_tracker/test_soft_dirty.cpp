// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "dirty_tracker/dirty_tracker.hpp"
#include "dirty_tracker/soft_dirty.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint64_t kPresent = std::uint64_t{1} << 63;
constexpr std::uint64_t kSwapped = std::uint64_t{1} << 62;
constexpr std::uint64_t kFile = std::uint64_t{1} << 61;
constexpr std::uint64_t kSoftDirty = std::uint64_t{1} << 55;

std::vector<PagemapEntry> sample() {
    return {{kSoftDirty},                    // nothing there: a new mapping
            {kPresent | kSoftDirty},         // written
            {kSwapped | kSoftDirty | 0x1f},  // written, and swapped out since
            {kPresent | 0x1234},             // not written
            {kPresent | kFile | kSoftDirty}, // in a private mapping: still the file's
            {kPresent | kSoftDirty | 7}};
}

void what_the_bits_say_is_what_is_found() {
    DirtyPages pages;
    add_soft_dirty(pages, 0x10000, false, sample(), 4096);
    CHECK(pages.tracked_bytes == 4 * 4096U);
    CHECK(pages.dirty_bytes == 3 * 4096U);
    CHECK(pages.ranges.size() == 2);
    CHECK(pages.ranges[0].address == 0x11000 && pages.ranges[0].length == 2 * 4096U);
    CHECK(pages.ranges[1].address == 0x15000 && pages.ranges[1].length == 4096);
}

void pages_of_shared_memory_count_though_they_are_of_a_file() {
    DirtyPages pages;
    add_soft_dirty(pages, 0x10000, true, sample(), 4096);
    CHECK(pages.tracked_bytes == 5 * 4096U);
    CHECK(pages.dirty_bytes == 4 * 4096U);
    CHECK(pages.ranges.size() == 2);
    CHECK(pages.ranges[1].address == 0x14000 && pages.ranges[1].length == 2 * 4096U);
}

void the_pagemap_of_this_process_is_read() {
    const auto size = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
    void* pages =
        ::mmap(nullptr, 3 * size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(pages != MAP_FAILED);
    *(static_cast<volatile char*>(pages) + size) = 1;
    const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY));
    std::vector<PagemapEntry> entries(3);
    read_pagemap(pagemap.get(), reinterpret_cast<std::uint64_t>(pages), entries);
    CHECK(!entries[0].populated(false) && entries[1].populated(false));
    CHECK(!entries[2].populated(false) && !entries[1].file());
    ::munmap(pages, 3 * size);
}

// Either it works on the kernel that runs this, or it says why not and is refused.
void it_works_or_is_refused() {
    const std::string reason = why_not(DirtyBackend::soft_dirty);
    if (reason.empty()) {
        DirtyTracker tracker(::getpid(), DirtyBackend::soft_dirty);
        CHECK(tracker.scan(true).dirty_bytes != 0);
    } else {
        CHECK(reason.find("CONFIG_MEM_SOFT_DIRTY") != std::string::npos);
        CHECK_THROWS(Errc::unsupported, DirtyTracker(::getpid(), DirtyBackend::soft_dirty));
    }
}

} // namespace

int main() {
    what_the_bits_say_is_what_is_found();
    pages_of_shared_memory_count_though_they_are_of_a_file();
    the_pagemap_of_this_process_is_read();
    it_works_or_is_refused();
}
