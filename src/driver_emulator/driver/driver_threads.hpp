// SPDX-License-Identifier: Apache-2.0
/// The driver's own threads in the process.
#pragma once

#include "driver_emulator/driver_abi.hpp"

namespace gpustasis::emulator {

struct Driver;

/// Starts the thread that answers callers of the checkpoint API, with its name set.
Result start_restore_thread(Driver& driver) noexcept;

/// Starts "cuda-EvtHandlr", which has a pipe and an eventfd, and a helper named like the process.
Result start_context_threads(Driver& driver) noexcept;

/// Closes, or opens again, what the event thread listens to. The thread itself may be stopped by a
/// tracer meanwhile, so it stays.
void close_event_files() noexcept;
Result open_event_files(bool cloexec) noexcept;

} // namespace gpustasis::emulator
