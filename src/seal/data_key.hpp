// SPDX-License-Identifier: Apache-2.0
/// The key of one sealed checkpoint, and the keys that are made of it.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"
#include "seal/secret.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <utility>

namespace gpustasis::seal {

/// 256 bits that belong to one sealed_id. What was read from an envelope opens frames and cannot
/// seal any: only a FreshKey (frame_cipher.hpp) can, and the process that it has left a file to.
class DataKey {
public:
    static constexpr std::size_t kSize = 32;
    static constexpr std::size_t kRecordSize =
        64; ///< docs/format.md, "Key record"; without ancestors
    static constexpr std::size_t kAncestorSize = 48;
    static constexpr std::size_t kMaxAncestors = 1023; ///< a pipe holds such a record at once
    static constexpr std::size_t kMaxRecordSize = kRecordSize + kMaxAncestors * kAncestorSize;

    /// The key of a key record. Throws Error: corrupt_data if it is none; unsupported if it is newer.
    static DataKey from_record(Bytes record);
    /// A new random one. Throws Error: io.
    static DataKey random();

    const Id& sealed_id() const noexcept { return sealed_id_; }
    /// How many earlier checkpoints this one is built on, whose keys this holds as well.
    std::size_t ancestor_count() const noexcept {
        return ancestors_ ? ancestors_->size() / kAncestorSize : 0;
    }
    /// The key of the checkpoint `depth` parent links away, with those of its own ancestors; 0: this one.
    /// Throws Error: corrupt_data if this has no key of that one.
    DataKey at_depth(std::size_t depth) const;
    /// This key, of a checkpoint that is built on the one of `parent`: with that key, and those of all
    /// that it is built on itself. What ancestors this had are forgotten. Throws Error: bad_argument if they are
    /// more than kMaxAncestors; corrupt_data if this is one of them; io.
    DataKey built_on(const DataKey& parent) const;
    /// As if it were built on nothing.
    void forget_ancestors() noexcept { ancestors_.reset(); }
    /// What an envelope holds. Throws Error: io.
    Secret record() const;

    /// HKDF-SHA256 of the key: salt sealed_id, info `label`, a zero byte and `context`; 32 bytes. Keys with
    /// another label or context tell nothing of each other. Throws Error: io.
    Secret subkey(std::string_view label, Bytes context) const;

private:
    DataKey(const Id& sealed_id, Secret key) : sealed_id_(sealed_id), key_(std::move(key)) {}

    Id sealed_id_;
    Secret key_;
    std::optional<Secret>
        ancestors_{}; ///< sealed_id and key of each, the parent first; none: there are none
};

/// Frames of the file with this number within a checkpoint, whose header is `header`.
Secret frame_key(const DataKey& key, std::uint32_t file_id, Bytes header);

} // namespace gpustasis::seal
