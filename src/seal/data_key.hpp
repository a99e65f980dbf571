// SPDX-License-Identifier: Apache-2.0
/// The key of one sealed checkpoint, and the keys that are made of it.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"
#include "seal/secret.hpp"

#include <cstddef>
#include <cstdint>
#include <string_view>

namespace gpustasis::seal {

/// 256 bits that belong to one sealed_id. What was read from an envelope opens frames and cannot
/// seal any: only a FreshKey (frame_sealer.hpp) can.
class DataKey {
public:
    static constexpr std::size_t kSize = 32;
    static constexpr std::size_t kRecordSize = 64; ///< docs/format.md, "Key record"

    /// The key of a key record. Throws Error: corrupt_data if it is none; unsupported if it is newer.
    static DataKey from_record(Bytes record);
    /// A new random one. Throws Error: io.
    static DataKey random();

    const Id& sealed_id() const noexcept { return sealed_id_; }
    /// What an envelope holds. Throws Error: io.
    Secret record() const;

    /// HKDF-SHA256 of the key: salt sealed_id, info `label`, a zero byte and `context`; 32 bytes. Keys with
    /// another label or context tell nothing of each other. Throws Error: io.
    Secret subkey(std::string_view label, Bytes context) const;

private:
    DataKey(const Id& sealed_id, Secret key) : sealed_id_(sealed_id), key_(std::move(key)) {}

    Id sealed_id_;
    Secret key_;
};

/// Frames of the file with this number within a checkpoint, whose header is `header`.
Secret frame_key(const DataKey& key, std::uint32_t file_id, Bytes header);

} // namespace gpustasis::seal
