// SPDX-License-Identifier: Apache-2.0
/// The files of a chain of checkpoints that are not in the clear.
#pragma once

#include "core/image_input.hpp"

#include <cstdint>
#include <memory>
#include <string>

namespace gpustasis {

/// Core knows no keys: whoever has them opens such files for it.
class ChainFiles {
public:
    ChainFiles() = default;
    ChainFiles(const ChainFiles&) = delete;
    ChainFiles& operator=(const ChainFiles&) = delete;
    virtual ~ChainFiles() = default;

    /// The file `name` of the checkpoint in `directory`, which is `depth` parent links away. It outlives this.
    /// Not for several threads at once. Throws Error: io, corrupt_data, unsupported.
    virtual std::shared_ptr<const ImageInput> open(std::uint32_t depth, int directory,
                                                   const std::string& name) = 0;
};

} // namespace gpustasis
