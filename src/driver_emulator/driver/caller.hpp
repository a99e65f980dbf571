// SPDX-License-Identifier: Apache-2.0
/// The caller's side of the checkpoint API: finds a target's restore thread and talks to it.
#pragma once

#include "driver_emulator/channel.hpp"

#include <cstdint>
#include <functional>
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
/// it takes. The request's magic and id are filled in. Before the next caller has its turn, and only
/// after success, `accept` is called with the reply; what it returns is the result then. It may throw.
/// Returns operating_system if the target may not be looked into or dies meanwhile.
Result request_operation(pid_t pid, ChannelRequest& request, ChannelReply& reply,
                         const std::function<Result(const ChannelReply&)>& accept = {});

} // namespace gpustasis::emulator
