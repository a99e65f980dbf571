/// System calls made by another process, in the name of one of its stopped threads.
#pragma once

#include "cuda_plugin/task_table.hpp"

#include <sys/types.h>
#include <sys/user.h>

#include <cstdint>

namespace cudackpt {

/// Borrows the restore thread: a tracee in a ptrace event stop, inside a system call of its own
/// (its poll), with PTRACE_O_TRACESYSGOOD set. It is pointed at a `syscall` instruction of the
/// task, run through that one call, and every register is put back.
///
/// The job must survive the tracer's death at any instant. So the call is run from stop to stop
/// (PTRACE_SYSCALL) and not single-stepped: a step ends in a real SIGTRAP, which kills the task
/// if nobody is there to take it. And the instruction is followed by a `ret` into a signal frame
/// that leads the thread home (way_back.hpp). The record says that the signal mask is not the
/// thread's own meanwhile.
class InjectedSyscalls {
public:
    /// Throws Error: io; unsupported if the task has no code to do it with.
    explicit InjectedSyscalls(TaskRecord& record);
    InjectedSyscalls(const InjectedSyscalls&) = delete;
    InjectedSyscalls& operator=(const InjectedSyscalls&) = delete;
    /// Finishes if finish() was not called; errors are lost then, as another is on its way.
    ~InjectedSyscalls();

    /// Whether the thread finds home without us. If not (no such code in the task, or it has a
    /// shadow stack) the instruction is one of the vdso, and the tracer's death meanwhile is the
    /// task's.
    bool has_way_back() const noexcept { return has_way_back_; }

    /// Returns what the kernel returned: -errno on failure. Throws Error: io.
    std::int64_t call(std::uint64_t number, std::uint64_t a, std::uint64_t b, std::uint64_t c);

    /// The thread is in an event stop as before when this returns. Throws Error: io.
    void finish();

private:
    TaskRecord& record_;
    user_regs_struct saved_{};
    std::uint64_t instruction_ = 0;
    std::uint64_t stack_ = 0;
    bool has_way_back_ = false;
    bool finished_ = false;
};

} // namespace cudackpt
