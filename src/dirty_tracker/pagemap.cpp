// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/pagemap.hpp"

#include "core/error.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>

namespace gpustasis {

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

} // namespace gpustasis
