// SPDX-License-Identifier: Apache-2.0
/// Files read and written past the page cache.
///
/// It wins where there is a disk: no copy, no memory taken from the job, no writeback to wait for at
/// the sync, and writes of several threads into space that is reserved run side by side (open(2),
/// O_DIRECT; docs/performance.md has the figures).
#pragma once

#include "core/bytes.hpp"
#include "core/unique_fd.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <new>
#include <utility>
#include <vector>

namespace gpustasis {

/// What direct I/O wants of offsets, sizes and addresses, on every file system it is used on here.
inline constexpr std::size_t kDirectAlignment = 4096;

constexpr std::size_t direct_size(std::size_t size) noexcept {
    return (size + kDirectAlignment - 1) & ~(kDirectAlignment - 1);
}

/// A buffer that begins at a multiple of kDirectAlignment and is a multiple of it long. Its content is
/// not set. Throws std::bad_alloc.
class AlignedBuffer {
public:
    explicit AlignedBuffer(std::size_t size)
        : size_(direct_size(size)),
          data_(static_cast<std::byte*>(size_ == 0 ? nullptr
                                                   : std::aligned_alloc(kDirectAlignment, size_)),
                Free{}) {
        if (size_ != 0 && data_ == nullptr)
            throw std::bad_alloc();
    }

    /// `count` of them, one behind the other, on huge pages where the kernel has some (madvise(2), MADV_HUGEPAGE): a
    /// device is given a request of so many pages at most, and small ones make it many requests (docs/performance.md has
    /// the figures). Less than half a huge page in all is taken as always. Throws std::bad_alloc.
    static std::vector<AlignedBuffer> side_by_side(std::size_t count, std::size_t size);

    MutBytes bytes() noexcept { return {data_.get(), size_}; }

private:
    struct Free {
        std::shared_ptr<void> mapping; ///< none: it is of the heap
        void operator()(std::byte* data) const noexcept {
            if (!mapping)
                std::free(data);
        }
    };
    AlignedBuffer(std::size_t size, std::byte* data, std::shared_ptr<void> mapping)
        : size_(size), data_(data, Free{std::move(mapping)}) {}

    std::size_t size_;
    std::unique_ptr<std::byte, Free> data_;
};

/// Buffers that are used again and again, by any number of threads: large memory that comes new from the kernel each
/// time costs a fault for every page of it, more than what is done with it. It makes kMadeAtOnce bytes of them at once, and
/// keeps no more than were taken at once and those made with them, and no more than kMostKept bytes.
class BufferPool {
public:
    /// One for each of the threads that may wait for a device (workers.hpp), with what is read or written at once.
    static constexpr std::size_t kMostKept = std::size_t{64} << 20;
    static constexpr std::size_t kMadeAtOnce = std::size_t{4} << 20;
    /// Smaller ones are made one by one.
    static constexpr std::size_t kLeastShared = std::size_t{64} << 10;

    /// One for all files of this process that are read: a restore has one open for each task, and more for those that it
    /// is built on. It is there until nobody has it any more.
    static std::shared_ptr<BufferPool> of_process();

    /// One of `size` bytes at least. Throws std::bad_alloc.
    AlignedBuffer take(std::size_t size) {
        {
            const std::lock_guard lock(mutex_);
            while (!spare_.empty()) {
                AlignedBuffer found = std::move(spare_.back());
                spare_.pop_back();
                kept_ -= found.bytes().size();
                if (found.bytes().size() >= size)
                    return found;
            }
        }
        const std::size_t count = size < kLeastShared ? 1 : kMadeAtOnce / size;
        std::vector<AlignedBuffer> made =
            AlignedBuffer::side_by_side(std::max<std::size_t>(1, count), size);
        for (; made.size() > 1; made.pop_back())
            put_back(std::move(made.back()));
        return std::move(made.front());
    }
    void put_back(AlignedBuffer buffer) {
        const std::size_t size = buffer.bytes().size();
        const std::lock_guard lock(mutex_);
        if (size > kMostKept - kept_)
            return;
        spare_.push_back(std::move(buffer));
        kept_ += size;
    }
    /// Bytes of the buffers that nobody has at the moment.
    std::size_t kept() const {
        const std::lock_guard lock(mutex_);
        return kept_;
    }

private:
    mutable std::mutex mutex_;
    std::vector<AlignedBuffer> spare_; ///< the last one first: it is in a cache
    std::size_t kept_ = 0;             ///< bytes of those
};

/// Whether `bytes` can be a buffer of direct I/O.
inline bool is_aligned(Bytes bytes) noexcept {
    return reinterpret_cast<std::uintptr_t>(bytes.data()) % kDirectAlignment == 0 &&
           bytes.size() % kDirectAlignment == 0;
}

/// How chunk data reaches a file.
enum class IoMode : std::uint8_t {
    automatic, ///< direct where the file system says that it can (statx, STATX_DIOALIGN)
    buffered,
    direct, ///< an error where it cannot
};

/// Open the file of `fd` once more for direct I/O with these flags (O_RDONLY or O_WRONLY). None
/// where the file system does not offer it, or `mode` is buffered.
/// Throws Error: unsupported if `mode` is direct and it is not to be had, io.
UniqueFd open_direct(int fd, int flags, IoMode mode);

/// Whether more than half of the file is in the page cache, going by samples of it: then direct reads
/// would be slower.
bool is_mostly_cached(int fd, std::uint64_t size) noexcept;

} // namespace gpustasis
