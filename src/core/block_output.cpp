// SPDX-License-Identifier: Apache-2.0
#include "core/block_output.hpp"

#include "core/error.hpp"
#include "core/file.hpp"

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

void BlockOutput::put(std::uint64_t offset, std::size_t size,
                      const std::function<void(MutBytes)>& make) {
    if (offset % kBlockSize + size <= kBlockSize) {
        make(at(offset, size));
        filled(offset, size);
        return;
    }
    std::vector<std::byte> made(size);
    make(made);
    for (Bytes rest = made; !rest.empty();) {
        const Bytes piece =
            rest.first(std::min<std::size_t>(rest.size(), kBlockSize - offset % kBlockSize));
        std::ranges::copy(piece, at(offset, piece.size()).begin());
        filled(offset, piece.size());
        rest = rest.subspan(piece.size());
        offset += piece.size();
    }
}

// Where these bytes of a block are put; it stays there until they are filled.
MutBytes BlockOutput::at(std::uint64_t offset, std::size_t size) {
    const std::lock_guard lock(mutex_);
    auto found = open_.find(offset / kBlockSize);
    if (found == open_.end())
        found = open_.emplace(offset / kBlockSize, Block{spare_.take(kBlockSize)}).first;
    return found->second.buffer.bytes().subspan(offset % kBlockSize, size);
}

void BlockOutput::filled(std::uint64_t offset, std::size_t size) {
    std::map<std::uint64_t, Block>::node_type full;
    {
        const std::lock_guard lock(mutex_);
        const auto found = open_.find(offset / kBlockSize);
        found->second.filled += size;
        if (found->second.filled < kBlockSize)
            return;
        full = open_.extract(found);
    }
    const std::uint64_t begin = full.key() * kBlockSize;
    chunks_.write(begin, full.mapped().buffer.bytes(), kBlockSize);
    if (!is_direct())
        begin_write_back(fd_, begin, kBlockSize);
    {
        const std::lock_guard lock(mutex_);
        written_ += kBlockSize; // not of a block that could not be written
    }
    spare_.put_back(std::move(full.mapped().buffer));
}

void BlockOutput::finish(std::uint64_t size) {
    std::uint64_t put = written_;
    for (const auto& [number, block] : open_)
        put += block.filled;
    if (put != size)
        throw Error(Errc::bad_argument,
                    std::to_string(put) + " of " + std::to_string(size) + " bytes were put");
    for (auto& [number, block] : open_) {
        const std::uint64_t begin = number * kBlockSize;
        const std::uint64_t wanted =
            begin < size ? std::min<std::uint64_t>(size - begin, kBlockSize) : 0;
        if (block.filled != wanted)
            throw Error(Errc::bad_argument, "of block " + std::to_string(number) + " " +
                                                std::to_string(block.filled) + " of " +
                                                std::to_string(wanted) + " bytes were put");
        chunks_.write(begin, block.buffer.bytes(), static_cast<std::size_t>(wanted));
    }
    open_.clear();
    chunks_.finish(size);
}

} // namespace gpustasis
