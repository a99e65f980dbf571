// SPDX-License-Identifier: Apache-2.0
/// Moves all device memory into fresh host memory of the process, and back. See checkpoint.hpp for
/// what may be used here.
#pragma once

#include "driver_emulator/wire.hpp"

namespace gpustasis::emulator {

struct Driver;

/// Copies VRAM to private anonymous mappings made for it, then gives up the GPUs: VRAM, device
/// files and their mappings. On failure everything is as before.
Result stage_device_memory(Driver& driver, const OperationPlan& plan) noexcept;

/// Takes GPUs again, the same or those that `pairs` says, fills their memory at the old addresses
/// and unmaps the staging. On failure after the GPUs were touched, `poisoned` is set.
Result unstage_device_memory(Driver& driver, const OperationPlan& plan, const GpuPair* pairs,
                             unsigned pair_count, bool& poisoned) noexcept;

/// What a fault does that happens half-way: die ends the process, or raises the signal in this
/// thread; end_thread ends this thread; hang_half hangs. Returns for others.
void fail_midway(const OperationPlan& plan) noexcept;

/// Never answers: as a driver does that waits for its GPU. Only a signal that kills ends it.
[[noreturn]] void hang() noexcept;

} // namespace gpustasis::emulator
