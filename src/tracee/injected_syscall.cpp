// SPDX-License-Identifier: Apache-2.0
#include "tracee/injected_syscall.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/task_maps.hpp"
#include "tracee/vector_state.hpp"
#include "tracee/way_back.hpp"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <charconv>
#include <csignal>
#include <exception>
#include <string>
#include <vector>

namespace gpustasis {
namespace {

constexpr std::array kSyscallInstruction = {std::byte{0x0f}, std::byte{0x05}};
// How PTRACE_O_TRACESYSGOOD marks a stop at a system call.
constexpr int kSyscallStop = SIGTRAP | 0x80;
// A stop for another reason is run on from; more of them than this is a fault.
constexpr int kMaxStops = 16;

std::uint64_t find_vdso_syscall(pid_t pid) {
    for (const Mapping& mapping : read_maps(pid)) {
        if (mapping.name != "[vdso]")
            continue;
        std::vector<std::byte> code(mapping.end - mapping.start);
        ProcessMemory(pid).read(mapping.start, code);
        const auto found = std::ranges::search(code, kSyscallInstruction);
        if (!found.empty())
            return mapping.start + static_cast<std::uint64_t>(found.begin() - code.begin());
    }
    throw Error(Errc::unsupported,
                "pid " + std::to_string(pid) + " has no vdso with a syscall instruction in it");
}

} // namespace

InjectedSyscalls::InjectedSyscalls(const BorrowedThread& thread) : thread_(thread) {
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", thread_.tid, nullptr, &saved_);
    mask_ = get_signal_mask(thread_.tid);
    if (const auto code = find_way_back_code(thread_.pid)) {
        instruction_ = code->syscall_ret;
        stack_ = write_way_back(thread_.pid, *code, saved_, read_vector_state(thread_.tid), mask_);
        has_way_back_ = true;
    } else {
        instruction_ = find_vdso_syscall(thread_.pid);
        stack_ = saved_.rsp;
    }
}

InjectedSyscalls::~InjectedSyscalls() {
    try {
        finish();
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): another error is on its way
    }
}

std::int64_t InjectedSyscalls::call(std::uint64_t number, std::uint64_t a, std::uint64_t b,
                                    std::uint64_t c) {
    aim(number, a, b, c);
    return run();
}

void InjectedSyscalls::aim(std::uint64_t number, std::uint64_t a, std::uint64_t b,
                           std::uint64_t c) {
    user_regs_struct registers = saved_;
    registers.rip = instruction_;
    registers.rsp = stack_;
    registers.rax = number;
    registers.orig_rax = ~0ULL; // nothing to restart: the kernel must not touch rip
    registers.rdi = a;
    registers.rsi = b;
    registers.rdx = c;
    ptrace_call(PTRACE_SETREGS, "PTRACE_SETREGS", thread_.tid, nullptr, &registers);
    if (thread_.signals_blocked)
        return;
    // Only now: from here on the way back unblocks them, too.
    thread_.signal_mask = mask_;
    thread_.signals_blocked = true;
    set_signal_mask(thread_.tid, kAllButSigtrap);
}

std::int64_t InjectedSyscalls::run() {
    run_to_syscall_stop(); // entry
    run_to_syscall_stop(); // exit
    return result();
}

std::int64_t InjectedSyscalls::call_if_alive(std::uint64_t number, std::uint64_t a) {
    aim(SYS_getpid, a, 0, 0);
    run_to_syscall_stop(); // entry: the kernel looks at the number after it
    user_regs_struct registers{};
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", thread_.tid, nullptr, &registers);
    registers.orig_rax = number;
    ptrace_call(PTRACE_SETREGS, "PTRACE_SETREGS", thread_.tid, nullptr, &registers);
    run_to_syscall_stop(); // exit
    return result();
}

std::int64_t InjectedSyscalls::result() {
    user_regs_struct registers{};
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", thread_.tid, nullptr, &registers);
    if (registers.rip != instruction_ + kSyscallInstruction.size())
        throw Error(Errc::io, "thread " + std::to_string(thread_.tid) +
                                  " made another system call than the one it was pointed at");
    return static_cast<std::int64_t>(registers.rax);
}

void InjectedSyscalls::run_to_syscall_stop() {
    std::uint64_t deliver = 0;
    for (int stop = 0; stop < kMaxStops; ++stop) {
        ptrace_call(PTRACE_SYSCALL, "PTRACE_SYSCALL", thread_.tid, nullptr,
                    reinterpret_cast<void*>(deliver));
        int status = 0;
        pid_t got = 0;
        do
            got = ::waitpid(thread_.tid, &status, __WALL);
        while (got < 0 && errno == EINTR);
        if (got != thread_.tid || !WIFSTOPPED(status))
            throw Error(Errc::io, "thread " + std::to_string(thread_.tid) +
                                      " died while a system call was made in its name");
        const int signal = WSTOPSIG(status);
        if (signal == kSyscallStop)
            return;
        deliver = 0;
        if (is_event_stop(status))
            continue;
        if (signal == SIGSTOP)
            deliver = SIGSTOP; // cannot be sent later: SIGCONT may have overtaken it by then
        else
            held_signals_.push_back(signal);
    }
    throw Error(Errc::io,
                "thread " + std::to_string(thread_.tid) + " does not come to a system call");
}

void InjectedSyscalls::finish() {
    if (finished_)
        return;
    finished_ = true;
    if (!thread_.signals_blocked)
        return; // never aimed: the thread is as it was
    // While the way back is still the thread's: its own registers do not bring its mask with them.
    set_signal_mask(thread_.tid, mask_);
    // Asked to stop first: the interrupted call of its own is restarted only on the way through
    // the kernel's signal code, and should we die in between, it must still take that way.
    ptrace_call(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", thread_.tid, nullptr, nullptr);
    ptrace_call(PTRACE_SETREGS, "PTRACE_SETREGS", thread_.tid, nullptr, &saved_);
    ptrace_call(PTRACE_CONT, "PTRACE_CONT", thread_.tid, nullptr, nullptr);
    wait_for_event_stop(thread_.tid);
    thread_.signals_blocked = false;
    for (const int signal : held_signals_)
        ::syscall(SYS_tgkill, thread_.pid, thread_.tid, signal);
}

bool is_home(pid_t pid, pid_t tid, long number) noexcept {
    try {
        const std::string task = "/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid);
        struct stat status {}; // not access(), which asks with the rights of the real user
        if (::stat(task.c_str(), &status) != 0)
            return errno == ENOENT;
        // First: a tracer that is still there could yet point it at another call.
        if (proc::tracer_of(tid) != 0)
            return false;
        // "running", or the number of the call that it waits in; -1: in none, on its way to one.
        const std::string text = proc::read_file(task + "/syscall");
        long found = -1;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), found);
        return error == std::errc{} && found >= 0 && found != number;
    } catch (const std::exception&) {
        return false; // it ends, or this process cannot look now
    }
}

UniqueFd take_descriptor(InjectedSyscalls& calls, int pidfd, std::uint64_t number,
                         std::uint64_t argument) {
    const std::int64_t made = calls.call_if_alive(number, argument);
    if (made < 0) {
        errno = static_cast<int>(-made);
        return UniqueFd();
    }
    calls.aim(SYS_close, static_cast<std::uint64_t>(made), 0, 0);
    UniqueFd ours(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd, made, 0)));
    const int error = errno;
    const std::int64_t closed = calls.run();
    if (!ours)
        throw io_error("pidfd_getfd", error);
    if (closed != 0)
        throw io_error("close in the name of another process", static_cast<int>(-closed));
    return ours;
}

} // namespace gpustasis
