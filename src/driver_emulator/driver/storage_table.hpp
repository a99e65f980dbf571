// SPDX-License-Identifier: Apache-2.0
/// What the target of a custom storage operation tells its caller: which memory there is, and where.
///
/// A file in memory that the target makes when the operation begins and closes when it ends. The caller
/// opens it through /proc/PID/fd and holds a POSIX write lock on it (fcntl F_SETLK) for as long as
/// the operation lives: children that it forks do not inherit that, and it ends with the process, in
/// whichever pid namespace that is. So a target that finds no lock knows that its caller is gone.
#pragma once

#include "driver_emulator/wire.hpp"

#include <cstdint>

namespace gpustasis::emulator {

inline constexpr std::uint32_t kTableMagic = 0x65'6d'74'01;

/// Followed by the StorageRuns of the first device, of the second, ...
struct StorageTable {
    std::uint32_t magic = kTableMagic;
    std::uint32_t device_count = 0;
    std::uint32_t d2h_ms_per_gib = 0; ///< of the caller's copies
    std::uint32_t h2d_ms_per_gib = 0;
    struct Entry {
        Uuid gpu;
        std::int32_t memory; ///< the target's descriptor of its VRAM on that GPU
        std::uint32_t run_count;
    } devices[kMaxGpus] = {}; ///< those that hold memory of the target
};

/// Memory that lies together. The mapping has one after the other.
struct StorageRun {
    std::uint64_t offset; ///< in the file of the VRAM
    std::uint64_t size;
};

} // namespace gpustasis::emulator
