// SPDX-License-Identifier: Apache-2.0
#include "core/direct_io.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <new>
#include <string>

namespace gpustasis {
namespace {

// linux/stat.h since 6.1, linux/mman.h and the system call table since 6.5; the headers of the
// machine that builds may be older than the kernel that runs.
constexpr unsigned kStatxDioAlign = 0x2000;
constexpr long kCachestatNumber = 451;

struct StatxTail { // struct statx from byte 144: stx_mnt_id on
    std::uint64_t mount_id;
    std::uint32_t dio_mem_align;
    std::uint32_t dio_offset_align;
};

struct CachestatRange {
    std::uint64_t offset;
    std::uint64_t length;
};
struct Cachestat {
    std::uint64_t cached, dirty, writeback, evicted, recently_evicted;
};

bool offers_direct(int fd) {
    struct statx status {};
    if (::statx(fd, "", AT_EMPTY_PATH, kStatxDioAlign, &status) != 0)
        return false;
    constexpr std::size_t kTailOffset = 144;
    static_assert(sizeof(struct statx) >= kTailOffset + sizeof(StatxTail));
    StatxTail tail{};
    std::memcpy(&tail, reinterpret_cast<const char*>(&status) + kTailOffset, sizeof tail);
    const auto fits = [](std::uint32_t alignment) {
        return alignment != 0 && alignment <= kDirectAlignment;
    };
    return (status.stx_mask & kStatxDioAlign) != 0 && fits(tail.dio_mem_align) &&
           fits(tail.dio_offset_align);
}

constexpr std::size_t kHugePage = std::size_t{2}
                                  << 20; // others are a multiple of it, or not to be had

/// Of at least `size` bytes, which begins with a huge page.
std::shared_ptr<void> map_huge(std::size_t size) {
    const std::size_t whole = (size + kHugePage - 1) / kHugePage * kHugePage;
    void* const place = ::mmap(nullptr, whole + kHugePage, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (place == MAP_FAILED)
        throw std::bad_alloc();
    const auto begin = reinterpret_cast<std::uintptr_t>(place);
    const std::uintptr_t first = (begin + kHugePage - 1) / kHugePage * kHugePage;
    if (first != begin)
        ::munmap(place, first - begin);
    if (const std::size_t behind = begin + kHugePage - first; behind != 0)
        ::munmap(reinterpret_cast<void*>(first + whole), behind);
    void* const mapping = reinterpret_cast<void*>(first);
    (void)::madvise(mapping, whole, MADV_HUGEPAGE); // refused: it costs time, nothing else
    return {mapping, [whole](void* at) { ::munmap(at, whole); }};
}

} // namespace

std::vector<AlignedBuffer> AlignedBuffer::side_by_side(std::size_t count, std::size_t size) {
    const std::size_t step = direct_size(size);
    std::vector<AlignedBuffer> made;
    made.reserve(count);
    if (step == 0 || count < kHugePage / 2 / step) {
        while (made.size() < count)
            made.emplace_back(step);
        return made;
    }
    const std::shared_ptr<void> mapping = map_huge(count * step);
    for (std::byte* at = static_cast<std::byte*>(mapping.get()); made.size() < count; at += step)
        made.push_back(AlignedBuffer(step, at, mapping));
    return made;
}

std::shared_ptr<BufferPool> BufferPool::of_process() {
    static std::mutex mutex;
    static std::weak_ptr<BufferPool> living;
    const std::lock_guard lock(mutex);
    std::shared_ptr<BufferPool> pool = living.lock();
    if (!pool) {
        pool = std::make_shared<BufferPool>();
        living = pool;
    }
    return pool;
}

UniqueFd open_direct(int fd, int flags, IoMode mode) {
    if (mode == IoMode::buffered || (mode == IoMode::automatic && !offers_direct(fd)))
        return {};
    // By way of /proc: the file has no name that could not be another's by now.
    UniqueFd direct(
        ::open(("/proc/self/fd/" + std::to_string(fd)).c_str(), flags | O_DIRECT | O_CLOEXEC));
    if (!direct && mode == IoMode::direct)
        throw Error(Errc::unsupported, io_error("direct I/O was asked for", errno).what());
    return direct;
}

bool is_mostly_cached(int fd, std::uint64_t size) noexcept {
    // All of a large file would take longer than it saves: 30 ms for 2 GiB.
    constexpr std::uint64_t kSamples = 32;
    constexpr std::uint64_t kSampleSize = 1U << 20;
    const auto page_size = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
    std::uint64_t cached = 0;
    for (std::uint64_t i = 0; i < kSamples; ++i) {
        CachestatRange range{size / kSamples * i, std::min(size / kSamples + 1, kSampleSize)};
        Cachestat found{};
        if (::syscall(kCachestatNumber, fd, &range, &found, 0) != 0)
            return true; // not known: the page cache is never wrong
        cached += std::min(found.cached * page_size, range.length);
    }
    return cached * 2 > kSamples * std::min(size / kSamples + 1, kSampleSize);
}

} // namespace gpustasis
