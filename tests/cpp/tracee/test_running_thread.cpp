// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "tracee/injected_syscall.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <string>

using namespace gpustasis;

namespace {

/// What the target and the test share.
struct Shared {
    std::atomic<std::uint64_t> rounds = 0;
    std::atomic<std::uint64_t> wrong = 0;
    std::atomic<std::uint64_t> signals = 0;
};

Shared* shared = nullptr;

/// Registers that hold a value over a long time without a system call: 1 if all still hold it.
std::uint64_t spin(std::uint64_t value) {
    std::uint64_t good = 0;
    asm volatile("movq %[value], %%xmm3\n"
                 "movq %[value], %%xmm12\n"
                 "pcmpeqd %%xmm7, %%xmm7\n"
                 "mov %[value], %%r13\n"
                 "mov $20000, %%rcx\n"
                 "1: paddq %%xmm7, %%xmm3\n" // minus one, both halves
                 "psubq %%xmm7, %%xmm3\n"
                 "add $7, %%r13\n"
                 "sub $7, %%r13\n"
                 "dec %%rcx\n"
                 "jnz 1b\n"
                 "movq %%xmm3, %%rax\n"
                 "movq %%xmm12, %%rdx\n"
                 "xor %[value], %%rax\n"
                 "xor %[value], %%rdx\n"
                 "xor %[value], %%r13\n"
                 "or %%rdx, %%rax\n"
                 "or %%r13, %%rax\n"
                 "or %%rcx, %%rax\n"
                 "xor %[good], %[good]\n"
                 "test %%rax, %%rax\n"
                 "setz %b[good]\n"
                 : [good] "=&r"(good)
                 : [value] "r"(value)
                 : "rax", "rcx", "rdx", "r13", "xmm3", "xmm7", "xmm12", "cc");
    return good;
}

pid_t start() {
    const pid_t pid = fork_child();
    if (pid != 0)
        return pid;
    ::signal(SIGUSR1, [](int) { ++shared->signals; });
    for (std::uint64_t value = 0x0123456789abcdef;; value = value * 2862933555777941757U + 1) {
        shared->wrong += spin(value) == 1 ? 0 : 1;
        ++shared->rounds;
    }
}

void run_on() {
    const std::uint64_t begin = shared->rounds;
    CHECK(comes_true([=] { return shared->rounds >= begin + 3; }));
    CHECK(shared->wrong == 0);
}

std::string blocked_signals(pid_t pid) {
    const std::string status = proc::read_file("/proc/" + std::to_string(pid) + "/status");
    const std::size_t at = status.find("SigBlk:");
    return status.substr(at, status.find('\n', at) - at);
}

[[noreturn]] void inject_for_ever(pid_t pid) {
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    for (;;) {
        const SeizedThread seized(pid, std::chrono::seconds(5));
        InjectedSyscalls task({pid, pid, blocked, mask});
        CHECK(task.has_way_back());
        CHECK(task.call(SYS_getpid, 0, 0, 0) == pid);
        CHECK(task.call(SYS_getppid, 0, 0, 0) > 0);
        task.finish();
    }
}

void calls_are_made_and_nothing_is_noticed() {
    const pid_t pid = start();
    run_on();
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    for (std::uint64_t round = 0; round < 50; ++round) {
        {
            const SeizedThread seized(pid, std::chrono::seconds(5));
            InjectedSyscalls task({pid, pid, blocked, mask});
            CHECK(task.call(SYS_getpid, 0, 0, 0) == pid);
            CHECK(blocked);
            ::kill(pid, SIGUSR1); // arrives while its signals are blocked
            CHECK(task.call(SYS_getpid, 0, 0, 0) == pid);
            CHECK(shared->signals == round);
            task.finish();
            CHECK(!blocked);
            CHECK(shared->signals == round); // it is taken once the thread is let go of
        }
        CHECK(comes_true([=] { return shared->signals == round + 1; }));
    }
    run_on();
    CHECK(shared->signals == 50);
    CHECK(blocked_signals(pid).find_first_not_of("SigBlk:\t0") == std::string::npos);
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
}

// Nobody mends anything after the tracer's death.
void the_tracer_may_die_at_any_instant() {
    constexpr int kRounds = 150;
    const pid_t pid = start();
    run_on();
    for (int round = 0; round < kRounds; ++round) {
        const pid_t tracer = fork_child();
        if (tracer == 0)
            inject_for_ever(pid);
        ::usleep(static_cast<useconds_t>(3000 + round * 37));
        CHECK(::kill(tracer, SIGKILL) == 0);
        CHECK(::waitpid(tracer, nullptr, 0) == tracer);
        run_on();
        CHECK(blocked_signals(pid).find_first_not_of("SigBlk:\t0") == std::string::npos);
    }
    const std::uint64_t before = shared->signals;
    ::kill(pid, SIGUSR1);
    run_on();
    CHECK(comes_true([=] { return shared->signals == before + 1; }));
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
}

void a_stopped_process_stays_stopped() {
    const pid_t pid = start();
    run_on();
    ::kill(pid, SIGSTOP);
    CHECK(comes_true([=] { return proc::state(pid) == 'T'; }));
    {
        std::atomic<bool> blocked = false;
        std::atomic<std::uint64_t> mask = 0;
        const SeizedThread seized(pid, std::chrono::seconds(5));
        InjectedSyscalls task({pid, pid, blocked, mask});
        CHECK(task.call(SYS_getpid, 0, 0, 0) == pid);
        task.finish();
    }
    CHECK(comes_true([=] { return proc::state(pid) == 'T'; }));
    const std::uint64_t rounds = shared->rounds;
    ::usleep(20000);
    CHECK(shared->rounds == rounds);
    ::kill(pid, SIGCONT);
    run_on();
    ::kill(pid, SIGKILL);
    ::waitpid(pid, nullptr, 0);
}

} // namespace

int main() {
    void* memory =
        ::mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    shared = new (memory) Shared;
    calls_are_made_and_nothing_is_noticed();
    a_stopped_process_stays_stopped();
    the_tracer_may_die_at_any_instant();
}
