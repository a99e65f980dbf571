// SPDX-License-Identifier: Apache-2.0
/// What /proc says about a CUDA task.
#pragma once

#include "tracee/proc.hpp"

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace gpustasis::proc {

/// Whether the task may use CUDA: a library or a device file of the driver is mapped, and a thread
/// is named as the driver names its restore thread, "cuda" and more. The driver finds its thread by
/// that name (docs/design.md) and maps its device in cuInit, so a task that lacks either has no
/// CUDA state that a checkpoint call could reach. Programs that map a library of the driver and
/// have a thread called "cuda..." pass too: the driver has the last word.
/// Throws Error: io, also if the task is gone.
bool may_use_cuda(pid_t pid);

/// Whether a thread of this name is the driver's restore thread: "cuda" and two numbers in 11 hex digits.
bool is_driver_thread(std::string_view name);

/// Throw Error: unsupported if the name of a thread of the task would have the driver open
/// something else than a pipe. The driver takes two descriptor numbers out of the name of its
/// restore thread (docs/design.md) and opens them through /proc with the rights of the caller: a task
/// that names a thread so could have root write to a file that the task may only read.
void require_pipes_in_thread_names(pid_t pid);

/// The two descriptors of the task that the name of its restore thread `tid` gives; nullopt: it gives none.
/// Throws Error: io if the thread is gone.
std::optional<std::array<std::uint64_t, 2>> restore_channel(pid_t pid, pid_t tid);

/// Wait until the task has no threads but those of `before` (ascending): criu would dump one that the
/// driver made for the checkpoint and is about to end. Throws Error: io if one stays.
void wait_for_helper_threads(pid_t pid, const std::vector<pid_t>& before);

} // namespace gpustasis::proc
