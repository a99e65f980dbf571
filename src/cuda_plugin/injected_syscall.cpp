#include "cuda_plugin/injected_syscall.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/ptrace_call.hpp"
#include "cuda_plugin/task_maps.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/way_back.hpp"

#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <string>
#include <vector>

namespace cudackpt {
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

void run_to_syscall_stop(pid_t tid) {
    for (int stop = 0; stop < kMaxStops; ++stop) {
        ptrace_call(PTRACE_SYSCALL, "PTRACE_SYSCALL", tid, nullptr, nullptr);
        int status = 0;
        pid_t got = 0;
        do
            got = ::waitpid(tid, &status, __WALL);
        while (got < 0 && errno == EINTR);
        if (got != tid || !WIFSTOPPED(status))
            throw Error(Errc::io, "thread " + std::to_string(tid) +
                                      " died while a system call was made in its name");
        if (WSTOPSIG(status) == kSyscallStop)
            return;
    }
    throw Error(Errc::io, "thread " + std::to_string(tid) + " does not come to a system call");
}

} // namespace

InjectedSyscalls::InjectedSyscalls(TaskRecord& record) : record_(record) {
    const pid_t tid = record.restore_tid;
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &saved_);
    const std::uint64_t mask = get_signal_mask(tid);
    if (const auto code = find_way_back_code(record.pid)) {
        instruction_ = code->syscall_ret;
        stack_ = write_way_back(record.pid, *code, saved_, mask);
        has_way_back_ = true;
    } else {
        instruction_ = find_vdso_syscall(record.pid);
        stack_ = saved_.rsp;
    }
    record_.signal_mask = mask;
    record_.thawed = true;
    set_signal_mask(tid, kAllButSigtrap);
}

InjectedSyscalls::~InjectedSyscalls() {
    try {
        finish();
    } catch (const Error& e) {
        host::debug(e.what()); // another error is on its way, and that one says more
    }
}

std::int64_t InjectedSyscalls::call(std::uint64_t number, std::uint64_t a, std::uint64_t b,
                                    std::uint64_t c) {
    user_regs_struct registers = saved_;
    registers.rip = instruction_;
    registers.rsp = stack_;
    registers.rax = number;
    registers.orig_rax = ~0ULL; // nothing to restart: the kernel must not touch rip
    registers.rdi = a;
    registers.rsi = b;
    registers.rdx = c;
    const pid_t tid = record_.restore_tid;
    ptrace_call(PTRACE_SETREGS, "PTRACE_SETREGS", tid, nullptr, &registers);
    run_to_syscall_stop(tid); // entry
    run_to_syscall_stop(tid); // exit
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &registers);
    if (registers.rip != instruction_ + kSyscallInstruction.size())
        throw Error(Errc::io, "thread " + std::to_string(tid) +
                                  " made another system call than the one it was pointed at");
    return static_cast<std::int64_t>(registers.rax);
}

void InjectedSyscalls::finish() {
    if (finished_)
        return;
    finished_ = true;
    const pid_t tid = record_.restore_tid;
    // Asked to stop first: the interrupted call of its own is restarted only on the way through
    // the kernel's signal code, and should we die in between, it must still take that way.
    ptrace_call(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", tid, nullptr, nullptr);
    ptrace_call(PTRACE_SETREGS, "PTRACE_SETREGS", tid, nullptr, &saved_);
    ptrace_call(PTRACE_CONT, "PTRACE_CONT", tid, nullptr, nullptr);
    wait_for_event_stop(tid);
    set_signal_mask(tid, record_.signal_mask);
    record_.thawed = false;
}

} // namespace cudackpt
