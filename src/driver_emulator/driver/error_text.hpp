// SPDX-License-Identifier: Apache-2.0
/// Names and descriptions of results, as cuGetErrorName and cuGetErrorString give them.
#pragma once

namespace gpustasis::emulator {

struct ErrorText {
    int code;
    const char* name;
    const char* description;
};

/// Null if the code is none that the emulator knows.
[[nodiscard]] const ErrorText* find_error_text(int code) noexcept;

} // namespace gpustasis::emulator
