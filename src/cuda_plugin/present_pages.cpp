// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/present_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>

namespace gpustasis {
namespace {

constexpr int kPopulateWrite = 23; // MADV_POPULATE_WRITE, of Linux 5.14; glibc 2.35 has the name

} // namespace

PresentPages::PresentPages(int file, std::uint64_t size) noexcept {
    if (size == 0)
        return;
    void* const memory = ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (memory == MAP_FAILED)
        return;
    memory_ = static_cast<std::byte*>(memory);
    size_ = size;
}

PresentPages::~PresentPages() {
    if (memory_ != nullptr)
        ::munmap(memory_, size_);
}

bool PresentPages::try_write(std::uint64_t offset, Bytes bytes) noexcept {
    if (offset > size_ || bytes.size() > size_ - offset)
        return false;
    static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t first = offset / page * page;
    if (::madvise(memory_ + first, offset + bytes.size() - first, kPopulateWrite) != 0)
        return false;
    std::memcpy(memory_ + offset, bytes.data(), bytes.size());
    return true;
}

} // namespace gpustasis
