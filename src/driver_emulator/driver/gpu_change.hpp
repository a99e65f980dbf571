// SPDX-License-Identifier: Apache-2.0
/// Giving the GPUs up at a Checkpoint and taking GPUs at a Restore, without what lies in their memory.
/// See checkpoint.hpp for what may be used here.
#pragma once

#include "driver_emulator/wire.hpp"

namespace gpustasis::emulator {

struct Driver;

/// The last moment at which event times can be asked for.
void settle_events(Driver& driver) noexcept;

/// Gives up VRAM, device files and their mappings. `placeholder`: see release_devices().
void release_gpus(Driver& driver, int placeholder) noexcept;

/// Where each of our devices goes: `gpus` by ordinal, as an index of now.gpus. Checks only, changes
/// nothing. Returns invalid_value if a GPU is missing or `pairs` does not name all, not_supported if
/// one is of another kind.
Result choose_gpus(const Driver& driver, const DaemonInfo& now, const GpuPair* pairs,
                   unsigned pair_count, unsigned (&gpus)[kMaxGpus]) noexcept;

/// Takes them: device files and, with a context, VRAM at the old addresses, all zeros. On failure
/// the caller calls release_gpus().
Result take_gpus(Driver& driver, const DaemonInfo& now, const unsigned (&gpus)[kMaxGpus],
                 bool had_context) noexcept;

/// Sends the modules to the new worker.
Result reload_modules(Driver& driver) noexcept;

/// From now on our devices are these.
void adopt_gpus(Driver& driver, const DaemonInfo& now, const unsigned (&gpus)[kMaxGpus]) noexcept;

} // namespace gpustasis::emulator
