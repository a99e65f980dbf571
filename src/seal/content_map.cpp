// SPDX-License-Identifier: Apache-2.0
#include "seal/content_map.hpp"

#include "core/error.hpp"

#include <algorithm>
#include <utility>

namespace gpustasis::seal {

ContentMap::ContentMap(std::vector<SealedEntry> entries, bool is_single)
    : entries_(std::move(entries)), is_single_(is_single) {
    starts_.reserve(entries_.size() + 1);
    starts_.push_back(0);
    for (const SealedEntry& entry : entries_) {
        // Neither sum can overflow: an entry is below 2^53, and the sum so far below 2^52.
        if (entry.size > kMaxContentSize ||
            starts_.back() + size_of_entry(entry) + entry.size > kMaxContentSize)
            throw Error(Errc::bad_argument, "files with more bytes than a sealed file can hold");
        starts_.push_back(starts_.back() + size_of_entry(entry) + entry.size);
    }
}

std::vector<ContentMap::Piece> ContentMap::pieces(std::uint64_t offset, std::size_t size) const {
    std::vector<Piece> found;
    const std::uint64_t end = offset + size;
    if (size == 0 || end > this->size())
        return found;
    auto next = std::ranges::upper_bound(starts_, offset);
    for (std::uint64_t at = offset; at < end; ++next) {
        const auto file = static_cast<std::size_t>(next - starts_.begin()) - 1;
        const std::uint64_t bytes_at = begin_of(file);
        const auto take = [&](bool is_entry, std::uint64_t from, std::uint64_t to) {
            const std::uint64_t until = std::min(to, end);
            if (at >= until)
                return;
            found.push_back({file, is_entry, at - from, static_cast<std::size_t>(at - offset),
                             static_cast<std::size_t>(until - at)});
            at = until;
        };
        take(true, starts_[file], bytes_at);
        take(false, bytes_at, starts_[file + 1]);
    }
    return found;
}

} // namespace gpustasis::seal
