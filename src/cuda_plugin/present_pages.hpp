// SPDX-License-Identifier: Apache-2.0
/// Memory that a file of a tmpfs has already, written by several threads at once.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>
#include <cstdint>

namespace gpustasis {

/// Through write(2) the kernel lets one thread at a time into a file. Through a mapping each thread writes by itself; for that
/// every page has to be mapped, which costs processor time: one thread alone is a fifth faster with write(2) (measured on
/// the machine of docs/performance.md, 3.7 and 4.4 GB/s; two threads into one file: 5.4 and 4.2).
class PresentPages {
public:
    /// The first `size` bytes of `file`. Where they cannot be mapped, it has none.
    PresentPages(int file, std::uint64_t size) noexcept;
    PresentPages(const PresentPages&) = delete;
    PresentPages& operator=(const PresentPages&) = delete;
    ~PresentPages();

    /// Write `bytes` there. From several threads at once. False: nothing was written, as where `offset` is beyond, the file
    /// was cut meanwhile, a page is missing and there is no memory for it, or the kernel cannot say so (before Linux 5.14):
    /// write(2) says why, and no signal comes.
    bool try_write(std::uint64_t offset, Bytes bytes) noexcept;

private:
    std::byte* memory_ = nullptr;
    std::uint64_t size_ = 0;
};

} // namespace gpustasis
