// SPDX-License-Identifier: Apache-2.0
/// Memory that direct I/O can use.
#pragma once

#include "core/bytes.hpp"

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <memory>
#include <new>

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
                                                   : std::aligned_alloc(kDirectAlignment, size_))) {
        if (size_ != 0 && data_ == nullptr)
            throw std::bad_alloc();
    }

    MutBytes bytes() noexcept { return {data_.get(), size_}; }

private:
    struct Free {
        void operator()(std::byte* data) const noexcept { std::free(data); }
    };
    std::size_t size_;
    std::unique_ptr<std::byte, Free> data_;
};

/// Whether `bytes` can be a buffer of direct I/O.
inline bool is_aligned(Bytes bytes) noexcept {
    return reinterpret_cast<std::uintptr_t>(bytes.data()) % kDirectAlignment == 0 &&
           bytes.size() % kDirectAlignment == 0;
}

} // namespace gpustasis
