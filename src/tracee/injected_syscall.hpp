// SPDX-License-Identifier: Apache-2.0
/// System calls made by another process, in the name of one of its stopped threads.
#pragma once

#include "core/unique_fd.hpp"

#include <sys/types.h>
#include <sys/user.h>

#include <atomic>
#include <cstdint>
#include <vector>

namespace gpustasis {

/// Which thread is borrowed, and where it is said that its signals are blocked meanwhile.
struct BorrowedThread {
    pid_t pid;
    pid_t tid;
    std::atomic<bool>& signals_blocked;
    std::atomic<std::uint64_t>& signal_mask; ///< the thread's own; set before signals_blocked is
};

/// Borrows a thread: a tracee in a ptrace event stop, with PTRACE_O_TRACESYSGOOD set. It is pointed
/// at a `syscall` instruction of the task, run through that one call, and every register is put
/// back; a system call of its own that was interrupted is made again.
///
/// The job must survive the tracer's death at any instant. So the call is run from stop to stop
/// (PTRACE_SYSCALL) and not single-stepped: a step ends in a real SIGTRAP, which kills the task
/// if nobody is there to take it. And the instruction is followed by a `ret` into a signal frame
/// that leads the thread home (way_back.hpp), and whose signal mask is the thread's own: its
/// signals are blocked only while that frame is its way. Signals that arrive are pending until
/// then; SIGSTOP stops the process, and the call goes on.
class InjectedSyscalls {
public:
    /// Throws Error: io; unsupported if the task has no code to do it with.
    explicit InjectedSyscalls(const BorrowedThread& thread);
    InjectedSyscalls(const InjectedSyscalls&) = delete;
    InjectedSyscalls& operator=(const InjectedSyscalls&) = delete;
    /// Finishes if finish() was not called; errors are lost then, as another is on its way.
    ~InjectedSyscalls();

    /// Whether the thread finds home without us. If not (no such code in the task, or it has a
    /// shadow stack) the instruction is one of the vdso, and the tracer's death meanwhile is the
    /// task's.
    bool has_way_back() const noexcept { return has_way_back_; }

    /// aim() and run() in one.
    std::int64_t call(std::uint64_t number, std::uint64_t a, std::uint64_t b, std::uint64_t c);

    /// Point the thread at a call; should the tracer die from here on, the call is made all the
    /// same. Throws Error: io.
    void aim(std::uint64_t number, std::uint64_t a, std::uint64_t b, std::uint64_t c);

    /// Run the call aimed at. Returns what the kernel returned: -errno on failure.
    /// Throws Error: io.
    std::int64_t run();

    /// A call with one argument that is made only if we live until it begins, and that so leaves
    /// nothing behind which nobody knows of. Returns as run(). Throws Error: io.
    std::int64_t call_if_alive(std::uint64_t number, std::uint64_t a);

    /// The thread is in an event stop as before when this returns. Throws Error: io.
    void finish();

private:
    void run_to_syscall_stop();
    std::int64_t result();

    BorrowedThread thread_;
    user_regs_struct saved_{};
    std::uint64_t mask_ = 0;
    std::uint64_t instruction_ = 0;
    std::uint64_t stack_ = 0;
    std::vector<int> held_signals_;
    bool has_way_back_ = false;
    bool finished_ = false;
};

/// Whether thread `tid` of process `pid`, which a tracer had borrowed that is gone, waits in a system
/// call of its own again: the call that it was pointed at (`number`) is neither under way nor still to
/// come. Also true if the thread has ended. False as long as nobody can say: while it runs, is
/// traced or stopped.
bool is_home(pid_t pid, pid_t tid, long number) noexcept;

/// Have the thread of `calls` make system call `number`, whose result is a descriptor; take a copy of
/// that through `pidfd`, which is of the thread's process, and have the thread close it: the
/// process's table of descriptors is as before. If this process is killed between the call and its
/// being noticed (some microseconds, more on a busy machine), the descriptor is left open there, unused.
/// If the kernel refuses the call, the result is no descriptor, and errno says why.
/// Throws Error: io. The thread must still be finished with (InjectedSyscalls::finish()).
UniqueFd take_descriptor(InjectedSyscalls& calls, int pidfd, std::uint64_t number,
                         std::uint64_t argument);

} // namespace gpustasis
