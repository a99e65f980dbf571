// SPDX-License-Identifier: Apache-2.0
/// One thread of a running process, stopped for a moment.
#pragma once

#include <sys/types.h>

#include <chrono>

namespace gpustasis {

/// Seizes a thread (PTRACE_SEIZE) and stops it; the others of its process run on. Its seccomp
/// filters do not apply while it is held. If the tracer dies the kernel lets it go.
///
/// Only for an operating-system thread that ends when it is done with this: a thread that cannot
/// be stopped in time (it waits for a device, or for the child of a vfork) cannot be let go of
/// either, but by the end of its tracer.
class SeizedThread {
public:
    /// Throws Error: io, also if it does not stop within `timeout`; unsupported if another process
    /// traces it or its seccomp filters cannot be suspended.
    SeizedThread(pid_t tid, std::chrono::milliseconds timeout);
    SeizedThread(const SeizedThread&) = delete;
    SeizedThread& operator=(const SeizedThread&) = delete;
    /// Lets it go.
    ~SeizedThread();

private:
    pid_t tid_;
};

} // namespace gpustasis
