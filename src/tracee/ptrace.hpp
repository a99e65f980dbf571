// SPDX-License-Identifier: Apache-2.0
/// ptrace(2) with an Error instead of errno, and waiting for tracees to stop.
#pragma once

#include "core/error.hpp"

#include <sys/ptrace.h>
#include <sys/types.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <string>

namespace gpustasis {

// linux/ptrace.h; glibc 2.36 has no names for them.
inline constexpr auto kPtraceGetSignalMask = static_cast<__ptrace_request>(0x420a);
inline constexpr auto kPtraceSetSignalMask = static_cast<__ptrace_request>(0x420b);

/// Every signal but SIGTRAP, as a kernel signal mask.
inline constexpr std::uint64_t kAllButSigtrap = ~(std::uint64_t{1} << (SIGTRAP - 1));

/// Whether a thread that was given kAllButSigtrap has this mask: the kernel never blocks SIGKILL and SIGSTOP.
constexpr bool is_mask_of_dump(std::uint64_t mask) {
    return (mask | std::uint64_t{1} << (SIGKILL - 1) | std::uint64_t{1} << (SIGSTOP - 1)) ==
           kAllButSigtrap;
}

inline void ptrace_call(__ptrace_request request, const char* name, pid_t tid, void* address,
                        void* data) {
    if (::ptrace(request, tid, address, data) != 0)
        throw io_error(std::string(name) + " of thread " + std::to_string(tid), errno);
}

inline std::uint64_t get_signal_mask(pid_t tid) {
    std::uint64_t mask = 0;
    ptrace_call(kPtraceGetSignalMask, "PTRACE_GETSIGMASK", tid,
                reinterpret_cast<void*>(sizeof(mask)), &mask);
    return mask;
}

inline void set_signal_mask(pid_t tid, std::uint64_t mask) {
    ptrace_call(kPtraceSetSignalMask, "PTRACE_SETSIGMASK", tid,
                reinterpret_cast<void*>(sizeof(mask)), &mask);
}

/// Wait until tracee `tid`, which has been sent PTRACE_INTERRUPT, is in its event stop; signals
/// that stop it first are let through. Throws Error: io if it dies.
void wait_for_event_stop(pid_t tid);

/// The same for at most `timeout`; false: it has not stopped. Of a time in which this process does not run, as
/// on a machine that stands still, little counts: the thread may not have run either. After four times as long
/// by the clock it is given up all the same.
bool wait_for_event_stop(pid_t tid, std::chrono::milliseconds timeout);

/// Whether a status of waitpid() says PTRACE_EVENT_STOP: the end of a PTRACE_INTERRUPT, or that
/// the whole process is stopped by a signal such as SIGSTOP.
bool is_event_stop(int status) noexcept;

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

/// Whether a thread of process `pid` other than `but`, which the caller traces, has a tracer; also true if
/// the process starts threads faster than they can be looked at. Not by what /proc says: that shows no
/// tracer of another pid namespace. Each is seized until the return, and not stopped. Throws Error: io.
bool others_are_traced(pid_t pid, pid_t but);

} // namespace gpustasis
