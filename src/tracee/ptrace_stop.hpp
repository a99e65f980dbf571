// SPDX-License-Identifier: Apache-2.0
/// Waiting for tracees to stop.
#pragma once

#include <sys/types.h>

#include <chrono>

namespace gpustasis {

/// Wait until tracee `tid`, which has been sent PTRACE_INTERRUPT, is in its event stop; signals
/// that stop it first are let through. Throws Error: io if it dies.
void wait_for_event_stop(pid_t tid);

/// The same for at most `timeout`; false: it has not stopped.
bool wait_for_event_stop(pid_t tid, std::chrono::milliseconds timeout);

/// Whether a status of waitpid() says PTRACE_EVENT_STOP: the end of a PTRACE_INTERRUPT, or that
/// the whole process is stopped by a signal such as SIGSTOP.
bool is_event_stop(int status) noexcept;

} // namespace gpustasis
