// SPDX-License-Identifier: Apache-2.0
#include "core/block_output.hpp"

#include "core/error.hpp"
#include "core/file.hpp"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

// Whole blocks: what is written directly may end behind the file.
bool BlockOutput::reserve(std::uint64_t size) {
    return chunks_.reserve_all((size + kBlockSize - 1) / kBlockSize * kBlockSize);
}

void BlockOutput::put(std::uint64_t offset, std::size_t size,
                      const std::function<void(MutBytes)>& make) {
    if (size == 0)
        return;
    claim(offset, size);
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
        copy_bytes(piece, at(offset, piece.size()).data());
        filled(offset, piece.size());
        rest = rest.subspan(piece.size());
        offset += piece.size();
    }
}

// Nobody has put any of these bytes before, and nobody else will.
void BlockOutput::claim(std::uint64_t offset, std::size_t size) {
    const std::uint64_t end = offset + size;
    const std::lock_guard lock(mutex_);
    const auto after = claimed_.lower_bound(offset);
    const auto before = after == claimed_.begin() ? claimed_.end() : std::prev(after);
    if ((after != claimed_.end() && after->first < end) ||
        (before != claimed_.end() && before->second > offset)) {
        was_put_twice_ = true;
        throw Error(Errc::bad_argument, "bytes from " + std::to_string(offset) + " to " +
                                            std::to_string(end) + " were put twice");
    }
    const bool is_behind = before != claimed_.end() && before->second == offset;
    const bool is_in_front = after != claimed_.end() && after->first == end;
    if (is_behind) {
        before->second = is_in_front ? after->second : end;
        if (is_in_front)
            claimed_.erase(after);
    } else if (is_in_front) {
        auto node = claimed_.extract(after);
        node.key() = offset;
        claimed_.insert(std::move(node));
    } else {
        claimed_.emplace(offset, end);
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
    std::uint64_t put = written_; // not of what was claimed, and could not be made or written
    for (const auto& [number, block] : open_)
        put += block.filled;
    const std::uint64_t end = claimed_.empty() ? 0 : claimed_.rbegin()->second;
    if (was_put_twice_)
        throw Error(Errc::bad_argument, "bytes were put twice");
    if (end > size)
        throw Error(Errc::bad_argument, "bytes were put up to " + std::to_string(end) + ", and " +
                                            std::to_string(size) + " is the size");
    if (put != size)
        throw Error(Errc::bad_argument,
                    std::to_string(put) + " of " + std::to_string(size) + " bytes were put");
    // So each byte was put, and once: an open block ends where the file does.
    for (auto& [number, block] : open_)
        chunks_.write(number * kBlockSize, block.buffer.bytes(), block.filled);
    open_.clear();
    chunks_.finish(size);
}

} // namespace gpustasis
