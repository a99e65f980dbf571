// SPDX-License-Identifier: Apache-2.0
/// The files of a chain of sealed checkpoints, by the one key that holds the keys of all.
#pragma once

#include "core/chain_files.hpp"
#include "seal/sealed_checkpoint.hpp"

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>

namespace gpustasis::seal {

/// A checkpoint of it opens under the key that was noted for its place when the next one was made, and under no
/// other: what is no such checkpoint, or another one, is refused.
class SealedChain final : public ChainFiles {
public:
    /// `key`: of the checkpoint at depth 0, which may be one that is being made. Throws Error: io.
    explicit SealedChain(const DataKey& key) : key_(key.at_depth(0)) {}

    std::shared_ptr<const ImageInput> open(std::uint32_t depth, int directory,
                                           const std::string& name) override;

private:
    using Place = std::tuple<std::uint32_t, dev_t, ino_t>; ///< depth, directory

    DataKey key_;
    std::map<Place, SealedCheckpoint> opened_;
};

} // namespace gpustasis::seal
