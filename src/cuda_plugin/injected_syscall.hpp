/// System calls made by another process, in the name of one of its stopped threads.
#pragma once

#include <sys/types.h>

#include <cstdint>

namespace cudackpt {

/// Borrows a tracee that is in a ptrace event stop and inside a system call of its own (the
/// restore thread in its poll), with PTRACE_O_TRACESYSGOOD set: points it at a `syscall`
/// instruction of the task's vdso, runs it through that one call, and puts every register back.
/// The call is run from stop to stop (PTRACE_SYSCALL) and not single-stepped: a step ends in a
/// real SIGTRAP, which kills the task if the tracer dies then, and resets how the task handles it.
/// The thread is in an event stop again when finish() returns.
class InjectedSyscalls {
public:
    /// Throws Error: io; unsupported if the task has no vdso with a syscall in it.
    InjectedSyscalls(pid_t pid, pid_t tid);
    InjectedSyscalls(const InjectedSyscalls&) = delete;
    InjectedSyscalls& operator=(const InjectedSyscalls&) = delete;
    ~InjectedSyscalls();

    /// Returns what the kernel returned: -errno on failure. Throws Error: io.
    std::int64_t call(std::uint64_t number, std::uint64_t a, std::uint64_t b, std::uint64_t c);

    /// Throws Error: io.
    void finish();

private:
    struct State;
    State* state_;
};

} // namespace cudackpt
