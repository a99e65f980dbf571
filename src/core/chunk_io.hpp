// SPDX-License-Identifier: Apache-2.0
/// Where a reader gets the stored bytes of chunks, and where a writer puts them.
#pragma once

#include "core/bytes.hpp"
#include "core/direct_io.hpp"
#include "core/image_input.hpp"
#include "core/unique_fd.hpp"

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>

namespace gpustasis {

/// An image in the clear: a file, or a part of one.
class ChunkInput final : public ImageInput {
public:
    /// The image is the `size` bytes of `file` from `begin`. Throws Error: unsupported if `mode` is
    /// direct and that is not to be had, io.
    ChunkInput(std::shared_ptr<const UniqueFd> file, std::uint64_t begin, std::uint64_t size,
               IoMode mode);

    std::uint64_t size() const noexcept override { return size_; }
    /// More that is written to `buffer` is what follows in the file.
    Bytes read(std::uint64_t offset, std::size_t size, MutBytes buffer) const override;
    bool is_direct() const noexcept override { return static_cast<bool>(direct_); }

private:
    std::shared_ptr<const UniqueFd> file_;
    std::uint64_t begin_;
    std::uint64_t size_;
    IoMode mode_;
    UniqueFd direct_; ///< none: buffered
};

/// A new, empty file that chunks are written to, each at its offset, by several threads at once.
class ChunkOutput {
public:
    /// `fd` stays the caller's. `alignment`: of the offsets that will come.
    /// Throws Error: unsupported if `mode` is direct and that is not to be had, io.
    ChunkOutput(int fd, IoMode mode, std::uint32_t alignment);

    /// Write the first `size` bytes of `buffer` at `offset`. Of an aligned buffer what is behind
    /// them, up to a multiple of kDirectAlignment, may be written too, and is set to zero for it.
    /// Throws Error: io.
    void write(std::uint64_t offset, MutBytes buffer, std::size_t size);

    /// As FileOutput::reserve().
    bool reserve_all(std::uint64_t size);

    /// Give back what was reserved or written beyond `size`, the size of the whole file. Throws Error: io.
    void finish(std::uint64_t size);

    bool is_direct() const noexcept { return static_cast<bool>(direct_); }

private:
    bool reserve(std::uint64_t end);

    int fd_;
    IoMode mode_;
    UniqueFd direct_; ///< none: buffered
    std::mutex mutex_;
    std::mutex buffered_;                     ///< see write()
    std::atomic<std::uint64_t> reserved_ = 0; ///< space that the file has
    std::atomic<bool> reserving_ = true;      ///< false: this file system cannot
};

} // namespace gpustasis
