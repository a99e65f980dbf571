// SPDX-License-Identifier: Apache-2.0
/// The driver's own threads in the process.
#pragma once

#include "driver_emulator/driver_abi.hpp"

namespace gpustasis::emulator {

struct Driver;

/// Starts a detached thread with all signals blocked: they are the program's. It runs, with its
/// name, when this returns; nullptr: the program's name. Returns false if there is none to be had.
bool start_driver_thread(void* (*body)(void*), void* argument, const char* name = nullptr) noexcept;

/// Starts the thread that answers callers of the checkpoint API, with its name set.
Result start_restore_thread(Driver& driver) noexcept;

/// Starts "cuda-EvtHandlr", which listens to driver.event_files, and a helper named like the process.
Result start_context_threads(Driver& driver) noexcept;

/// From Lock to Unlock the event thread waits for nothing but the end of that. These wait for
/// nothing: it may be stopped by a tracer.
void hold_event_thread(Driver& driver) noexcept;
void resume_event_thread() noexcept;

} // namespace gpustasis::emulator
