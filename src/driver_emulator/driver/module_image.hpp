// SPDX-License-Identifier: Apache-2.0
/// A kernel file in memory.
#pragma once

#include "driver_emulator/driver_abi.hpp"

#include <cstddef>

namespace gpustasis::emulator {

/// Finds the length of a shared object that starts at `image`, from its own headers, as
/// cuModuleLoadData is told no length. At most `limit` bytes are looked at.
/// Returns no_binary_for_gpu for code of a real GPU, invalid_ptx for PTX, invalid_image for others.
[[nodiscard]] Result measure_image(const void* image, std::size_t limit, std::size_t* size);

} // namespace gpustasis::emulator
