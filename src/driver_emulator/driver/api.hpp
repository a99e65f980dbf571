// SPDX-License-Identifier: Apache-2.0
/// How an entry point of libcuda.so.1 is written.
#pragma once

#include "driver_emulator/driver_abi.hpp"

/// The head of an exported function; CUresult is an int to its callers.
#define GPUSTASIS_API(name) extern "C" __attribute__((visibility("default"))) int name

namespace gpustasis::emulator {

[[nodiscard]] constexpr int code(Result result) noexcept {
    return static_cast<int>(result);
}

} // namespace gpustasis::emulator
