// SPDX-License-Identifier: Apache-2.0
/// Which bytes of the content of a sealed file are which bytes of the checkpoint's files.
#pragma once

#include "seal/sealed_format.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpustasis::seal {

/// The content is, for each file in the order of the index, its entry and then its bytes; of a sealed file
/// for one file, its bytes.
class ContentMap {
public:
    /// A run of the content: of the entry of file `file`, or of its bytes.
    struct Piece {
        std::size_t file = 0;
        bool is_entry = false;
        std::uint64_t offset = 0; ///< in the entry, or in the file
        std::size_t at = 0;       ///< from the beginning of what was asked for
        std::size_t size = 0;
    };

    /// Throws Error: bad_argument if all are longer than kMaxContentSize.
    explicit ContentMap(std::vector<SealedEntry> entries, bool is_single = false);

    const std::vector<SealedEntry>& entries() const noexcept { return entries_; }
    std::uint64_t size() const noexcept { return starts_.back(); }
    /// Where the bytes of a file begin.
    std::uint64_t begin_of(std::size_t file) const {
        return starts_[file] + size_of_entry(entries_[file]);
    }
    /// The pieces of `size` bytes from `offset`, which lie within the content.
    std::vector<Piece> pieces(std::uint64_t offset, std::size_t size) const;

private:
    std::size_t size_of_entry(const SealedEntry& entry) const noexcept {
        return is_single_ ? 0 : entry_size(entry);
    }

    std::vector<SealedEntry> entries_;
    bool is_single_;
    std::vector<std::uint64_t> starts_; // of each entry, and the end
};

} // namespace gpustasis::seal
