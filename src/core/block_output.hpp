// SPDX-License-Identifier: Apache-2.0
/// A file whose parts come in any size and at any place, written in blocks.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_io.hpp"
#include "core/direct_io.hpp"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <mutex>

namespace gpustasis {

/// Parts are put together in memory, and each block is written once it is full: past the page cache where that is
/// to be had, which takes whole aligned blocks only. Holds the blocks that are not full: with parts that come
/// nearly in order about one more than those parts span.
class BlockOutput {
public:
    static constexpr std::size_t kBlockSize = std::size_t{1} << 20;

    /// `fd`: a new, empty file, which stays the caller's. Throws Error: as ChunkOutput.
    BlockOutput(int fd, IoMode mode) : fd_(fd), chunks_(fd, mode, kDirectAlignment) {}

    /// As FileOutput::reserve(). Before anything is put.
    bool reserve(std::uint64_t size);

    /// Make the `size` bytes at `offset`: `make` fills all of what it is given. By several threads at once, each
    /// byte of the file once. Throws Error: bad_argument if one of them was put before, and then none of them is put;
    /// io, and what `make` throws. After that finish() fails.
    void put(std::uint64_t offset, std::size_t size, const std::function<void(MutBytes)>& make);

    /// The file has `size` bytes, and all of them were put. Once, when no thread puts any more; the file is not
    /// synced. Throws Error: io; bad_argument if a byte is missing, or one was put twice or behind `size`.
    void finish(std::uint64_t size);

    bool is_direct() const noexcept { return chunks_.is_direct(); }

private:
    struct Block {
        AlignedBuffer buffer;
        std::size_t filled = 0;
    };
    void claim(std::uint64_t offset, std::size_t size);
    MutBytes at(std::uint64_t offset, std::size_t size);
    void filled(std::uint64_t offset, std::size_t size);

    int fd_;
    ChunkOutput chunks_;
    std::mutex mutex_;
    std::map<std::uint64_t, Block> open_; ///< by number; those that are not full
    std::uint64_t written_ = 0;           ///< bytes of blocks that were full
    /// Begin and end of what was put, or is being put. What touches is one: a sum of bytes cannot tell a part that came
    /// twice from one that is missing.
    std::map<std::uint64_t, std::uint64_t> claimed_;
    bool was_put_twice_ = false; ///< a byte, or somebody tried to
    BufferPool spare_;
};

} // namespace gpustasis
