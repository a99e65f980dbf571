// SPDX-License-Identifier: Apache-2.0
/// Hashes of plain contents that may be stored where others can read them.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"
#include "seal/data_key.hpp"

namespace gpustasis::seal {

/// HMAC-SHA256, of which the first 16 bytes are kept, under a key made of the data key: equal contents of two
/// checkpoints cannot be told equal, and nobody without the key can try out what a content was. Used by any
/// number of threads.
class ContentHash {
public:
    /// Throws Error: io.
    explicit ContentHash(const DataKey& key);

    /// Throws Error: io.
    Id operator()(Bytes content) const;

private:
    Secret key_;
};

} // namespace gpustasis::seal
