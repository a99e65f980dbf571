// SPDX-License-Identifier: Apache-2.0
/// Copies between host and device memory, wherever an address leads.
#pragma once

#include "driver_emulator/driver_abi.hpp"

#include <cstddef>
#include <cstdint>

namespace gpustasis::emulator {

struct Driver;

/// Copies `size` bytes; either address may be of a device or of the host, as unified addressing has
/// it. All that was launched before must be done. Returns invalid_value if a device range is not
/// one allocation's.
Result copy_bytes(Driver& driver, std::uint64_t to, std::uint64_t from, std::size_t size) noexcept;

/// When a copy that is asked for asynchronously is done.
enum class CopyTurn {
    at_once, ///< by the caller: an address is pageable host memory
    ordered, ///< in its turn among all that is done in streams
    direct,  ///< in its stream's lane: an address is of custom storage
};

/// Returns invalid_value as copy_bytes() does.
Result find_turn(Driver& driver, std::uint64_t to, std::uint64_t from, std::size_t size,
                 CopyTurn& turn) noexcept;

/// The same for fill_bytes(), which is never done at once.
[[nodiscard]] CopyTurn find_fill_turn(Driver& driver, DevicePtr to) noexcept;

/// Whether fill_bytes() takes these arguments.
bool is_fillable(Driver& driver, DevicePtr to, std::size_t pattern_size,
                 std::uint64_t size) noexcept;

/// Repeats a pattern of 1, 2 or 4 bytes over device memory.
Result fill_bytes(Driver& driver, DevicePtr to, const void* pattern, std::size_t pattern_size,
                  std::uint64_t size) noexcept;

} // namespace gpustasis::emulator
