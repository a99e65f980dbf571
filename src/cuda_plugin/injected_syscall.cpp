#include "cuda_plugin/injected_syscall.hpp"

#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "cuda_plugin/task_maps.hpp"
#include "cuda_plugin/thawed_thread.hpp"

#include <sys/ptrace.h>
#include <sys/user.h>
#include <sys/wait.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <string>
#include <vector>

namespace cudackpt {
namespace {

constexpr auto kGetSignalMask = static_cast<__ptrace_request>(0x420a);
constexpr auto kSetSignalMask = static_cast<__ptrace_request>(0x420b);
constexpr std::array kSyscallInstruction = {std::byte{0x0f}, std::byte{0x05}};
// How PTRACE_O_TRACESYSGOOD marks a stop at a system call.
constexpr int kSyscallStop = SIGTRAP | 0x80;
// A stop for another reason is run on from; more of them than this is a fault.
constexpr int kMaxStops = 16;

void trace(__ptrace_request request, const char* what, pid_t tid, void* address, void* data) {
    if (::ptrace(request, tid, address, data) != 0)
        throw io_error(std::string(what) + " of thread " + std::to_string(tid), errno);
}

std::uint64_t find_syscall(pid_t pid) {
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
        trace(PTRACE_SYSCALL, "PTRACE_SYSCALL", tid, nullptr, nullptr);
        int status = 0;
        pid_t got = 0;
        do
            got = ::waitpid(tid, &status, __WALL);
        while (got < 0 && errno == EINTR);
        if (got != tid || !WIFSTOPPED(status))
            throw Error(Errc::io, "thread " + std::to_string(tid)
                                      + " died while a system call was made in its name");
        if (WSTOPSIG(status) == kSyscallStop)
            return;
    }
    throw Error(Errc::io, "thread " + std::to_string(tid) + " does not come to a system call");
}

} // namespace

struct InjectedSyscalls::State {
    pid_t tid = 0;
    std::uint64_t instruction = 0;
    user_regs_struct registers{};
    std::uint64_t signal_mask = 0;
};

InjectedSyscalls::InjectedSyscalls(pid_t pid, pid_t tid) : state_(nullptr) {
    State state;
    state.tid = tid;
    state.instruction = find_syscall(pid);
    trace(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &state.registers);
    void* const size = reinterpret_cast<void*>(sizeof(state.signal_mask));
    trace(kGetSignalMask, "PTRACE_GETSIGMASK", tid, size, &state.signal_mask);
    std::uint64_t block = ~(std::uint64_t{1} << (SIGTRAP - 1));
    trace(kSetSignalMask, "PTRACE_SETSIGMASK", tid, size, &block);
    state_ = new State(state);
}

InjectedSyscalls::~InjectedSyscalls() {
    try {
        finish();
    } catch (const Error&) {
        // Another error is on its way, and that one says more.
    }
}

std::int64_t InjectedSyscalls::call(std::uint64_t number, std::uint64_t a, std::uint64_t b,
                                    std::uint64_t c) {
    user_regs_struct registers = state_->registers;
    registers.rip = state_->instruction;
    registers.rax = number;
    registers.orig_rax = ~0ULL; // nothing to restart: the kernel must not touch rip
    registers.rdi = a;
    registers.rsi = b;
    registers.rdx = c;
    const pid_t tid = state_->tid;
    trace(PTRACE_SETREGS, "PTRACE_SETREGS", tid, nullptr, &registers);
    run_to_syscall_stop(tid); // entry
    run_to_syscall_stop(tid); // exit
    trace(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &registers);
    if (registers.rip != state_->instruction + kSyscallInstruction.size())
        throw Error(Errc::io, "thread " + std::to_string(tid) + " made another system call than "
                                  "the one it was pointed at");
    return static_cast<std::int64_t>(registers.rax);
}

void InjectedSyscalls::finish() {
    if (state_ == nullptr)
        return;
    const State state = *state_;
    delete state_;
    state_ = nullptr;
    user_regs_struct registers = state.registers;
    std::uint64_t mask = state.signal_mask;
    // Asked to stop first: the interrupted call of its own is restarted only on the way through
    // the kernel's signal code, and should we die in between, it must still take that way.
    trace(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", state.tid, nullptr, nullptr);
    trace(PTRACE_SETREGS, "PTRACE_SETREGS", state.tid, nullptr, &registers);
    trace(PTRACE_CONT, "PTRACE_CONT", state.tid, nullptr, nullptr);
    wait_for_event_stop(state.tid);
    trace(kSetSignalMask, "PTRACE_SETSIGMASK", state.tid, reinterpret_cast<void*>(sizeof(mask)),
          &mask);
}

} // namespace cudackpt
