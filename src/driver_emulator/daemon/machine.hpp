// SPDX-License-Identifier: Apache-2.0
/// What the daemon emulates: GPUs, driver version, times and habits. Set at start, some at run
/// time.
#pragma once

#include "driver_emulator/wire.hpp"

#include <string>
#include <string_view>
#include <vector>

namespace gpustasis::emulator {

/// Milliseconds that a GPU takes for a GiB, as measured on A100, A10G and L4: 2 GB/s to the host,
/// 7 GB/s back.
inline constexpr std::uint32_t kD2hMsPerGib = 537;
inline constexpr std::uint32_t kH2dMsPerGib = 153;

/// The same for custom storage, as measured on an A100: 8.9 and 10.8 GB/s.
inline constexpr std::uint32_t kDirectD2hMsPerGib = 121;
inline constexpr std::uint32_t kDirectH2dMsPerGib = 99;

struct Machine {
    std::string socket_path;
    int ready_fd = -1; ///< gets one byte when clients can connect
    DaemonInfo info{};
    OperationPlan times{}; ///< delays of every operation; its fault fields are unused
};

/// Reads the daemon's command line. Throws std::invalid_argument with a sentence for the user.
[[nodiscard]] Machine parse_options(const std::vector<std::string_view>& arguments);

/// Sets one run-time knob, e.g. "lock_drain_ms" to "250". Throws std::invalid_argument.
void set_knob(Machine& machine, std::string_view key, std::string_view value);

/// The knobs and their values, as members of a JSON object without the braces.
[[nodiscard]] std::string knobs_json(const Machine& machine);

/// "GPU-01234567-89ab-cdef-0123-456789abcdef".
[[nodiscard]] std::string format_uuid(const Uuid& uuid);

} // namespace gpustasis::emulator
