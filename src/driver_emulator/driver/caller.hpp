// SPDX-License-Identifier: Apache-2.0
/// The caller's side of the checkpoint API: finds a target's restore thread and talks to it.
#pragma once

#include "driver_emulator/channel.hpp"

#include <cstdint>
#include <sys/types.h>

namespace gpustasis::emulator {

struct RestoreThread {
    pid_t tid = 0;
    ChannelEnds ends;
};

/// Searches the threads of `pid` (any thread's id will do). Touches nothing but /proc.
/// Returns operating_system if there is no such process, not_initialized if it has no restore thread,
/// invalid_value if `pid` cannot be one's id.
Result find_restore_thread(pid_t pid, RestoreThread& thread) noexcept;

/// Has the target's restore thread carry out one operation and waits for its reply, for as long as
/// it takes. `state` is the target's state afterwards.
/// Returns operating_system if the target may not be looked into or dies meanwhile.
Result request_operation(pid_t pid, Operation operation, std::uint32_t timeout_ms,
                         const GpuPair* pairs, unsigned pair_count, ProcessState& state) noexcept;

} // namespace gpustasis::emulator
