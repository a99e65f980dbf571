// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/present_pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>

namespace gpustasis {
namespace {

constexpr int kPopulateWrite = 23; // MADV_POPULATE_WRITE, of Linux 5.14; glibc 2.35 has the name

} // namespace

bool try_write_present(int file, std::uint64_t present, std::uint64_t offset,
                       Bytes bytes) noexcept {
    if (offset > present || bytes.size() > present - offset)
        return false;
    static const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    const std::uint64_t first = offset / page * page;
    const auto before = static_cast<std::size_t>(offset - first);
    const std::size_t size = before + bytes.size();
    void* const memory =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, static_cast<off_t>(first));
    if (memory == MAP_FAILED)
        return false;
    const bool is_there = ::madvise(memory, size, kPopulateWrite) == 0;
    if (is_there)
        std::memcpy(static_cast<std::byte*>(memory) + before, bytes.data(), bytes.size());
    ::munmap(memory, size);
    return is_there;
}

} // namespace gpustasis
