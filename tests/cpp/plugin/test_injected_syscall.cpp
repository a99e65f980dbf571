// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/undo.hpp"
#include "tracee/injected_syscall.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <poll.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>

using namespace gpustasis;

namespace {

constexpr std::size_t kSize = 64 << 20;
constexpr long kTraceSysGood = 1;

/// A child that waits in poll() as the driver's restore thread does, and answers each byte that
/// it is sent with one that says whether its memory is still full.
struct Target {
    pid_t pid = 0;
    int ask = -1;
    int answer = -1;
    std::byte* memory = nullptr;
};

[[noreturn]] void serve(int ask, int answer, const std::byte* memory) {
    for (;;) {
        pollfd poll{.fd = ask, .events = POLLIN, .revents = 0};
        // A poll that comes back for no reason is what a bad way back would look like.
        if (::poll(&poll, 1, -1) != 1)
            ::_exit(2);
        char byte = 0;
        if (::read(ask, &byte, 1) != 1)
            ::_exit(0);
        byte = memory[kSize / 2] == std::byte{7} ? 'f' : 'e';
        if (::write(answer, &byte, 1) != 1)
            ::_exit(3);
    }
}

Target start() {
    int ask[2];
    int answer[2];
    CHECK(::pipe(ask) == 0 && ::pipe(answer) == 0);
    auto* memory = static_cast<std::byte*>(
        ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    const pid_t pid = fork_child();
    if (pid == 0) {
        ::close(ask[1]);
        std::memset(memory, 7, kSize);
        char ready = 'r';
        CHECK(::write(answer[1], &ready, 1) == 1);
        serve(ask[0], answer[1], memory);
    }
    ::close(ask[0]);
    ::close(answer[1]);
    char ready = 0;
    CHECK(::read(answer[0], &ready, 1) == 1);
    ::usleep(2000); // into its poll
    return {pid, ask[1], answer[0], memory};
}

char ask(const Target& target) {
    char byte = '?';
    CHECK(::write(target.ask, &byte, 1) == 1);
    return ::read(target.answer, &byte, 1) == 1 ? byte : 'x';
}

void stop(const Target& target) {
    ::close(target.ask);
    int status = 0;
    CHECK(::waitpid(target.pid, &status, 0) == target.pid);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    ::close(target.answer);
    ::munmap(target.memory, kSize);
}

void seize(pid_t pid) {
    CHECK(::ptrace(PTRACE_SEIZE, pid, nullptr, kTraceSysGood) == 0);
    CHECK(::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr) == 0);
    wait_for_event_stop(pid);
}

void fill_record(TaskRecord& record, const Target& target) {
    record.pid = target.pid;
    record.restore_tid = target.pid;
    record.start_time = proc::start_time(target.pid);
}

std::int64_t drop(InjectedSyscalls& task, const Target& target) {
    return task.call(SYS_madvise, reinterpret_cast<std::uint64_t>(target.memory), kSize,
                     MADV_DONTNEED);
}

void memory_is_dropped_and_the_task_runs_on() {
    const Target target = start();
    CHECK(ask(target) == 'f');
    seize(target.pid);
    SharedTaskTable table(OnOrphaned::undo);
    TaskRecord& record = table.add(target.pid);
    fill_record(record, target);
    {
        InjectedSyscalls task({record.pid, record.restore_tid, record.thawed, record.signal_mask});
        CHECK(task.has_way_back());
        CHECK(drop(task, target) == 0);
        CHECK(task.call(SYS_getpid, 0, 0, 0) == target.pid);
        CHECK(task.call(SYS_madvise, 1, 1, 1) == -EINVAL);
        CHECK(record.thawed);
        task.finish();
        CHECK(!record.thawed);
    }
    CHECK(::ptrace(PTRACE_DETACH, target.pid, nullptr, nullptr) == 0);
    CHECK(ask(target) == 'e');
    stop(target);
}

// The tracer is killed at an instant that differs from round to round; the task must neither die
// nor see its poll return. Signal masks are the survivor's to mend, as the worker does.
void the_task_survives_the_tracers_death() {
    int died_early = 0;
    constexpr int kRounds = 60;
    for (int round = 0; round < kRounds; ++round) {
        const Target target = start();
        SharedTaskTable table(OnOrphaned::undo);
        TaskRecord& record = table.add(target.pid);
        fill_record(record, target);
        const bool is_late = round % 4 == 3; // not before a call was injected
        int injected[2];
        CHECK(::pipe(injected) == 0);
        const pid_t tracer = fork_child();
        if (tracer == 0) {
            seize(target.pid);
            InjectedSyscalls task(
                {record.pid, record.restore_tid, record.thawed, record.signal_mask});
            for (bool is_first = true;; is_first = false) {
                drop(task, target);
                if (is_late && is_first)
                    CHECK(::write(injected[1], "d", 1) == 1);
                // Fill a part again, so that the next drop takes its time too.
                task.call(SYS_madvise, reinterpret_cast<std::uint64_t>(target.memory), kSize / 8,
                          23 /* MADV_POPULATE_WRITE */);
            }
        }
        ::close(injected[1]);
        char byte = 0;
        CHECK(!is_late || ::read(injected[0], &byte, 1) == 1);
        ::close(injected[0]);
        ::usleep(static_cast<useconds_t>(500 + round * 397));
        CHECK(::kill(tracer, SIGKILL) == 0);
        int status = 0;
        CHECK(::waitpid(tracer, &status, 0) == tracer);
        reset_signal_mask(record);
        const char said = ask(target);
        CHECK(said == 'e' || said == 'f');
        died_early += said == 'f' ? 1 : 0;
        stop(target);
    }
    CHECK(died_early < kRounds); // else nothing was injected, and nothing shown
}

// At which it has stopped for a tracer that was killed: the next one is told of it, and gives it no signal.
void a_stop_at_a_system_call_ends_no_task() {
    for (const long options : {kTraceSysGood, 0L}) {
        const Target target = start();
        seize(target.pid);
        CHECK(::ptrace(PTRACE_SETOPTIONS, target.pid, nullptr, options) == 0);
        CHECK(::ptrace(PTRACE_SYSCALL, target.pid, nullptr, nullptr) == 0);
        siginfo_t stopped{};
        const auto pid = static_cast<id_t>(target.pid);
        CHECK(::waitid(P_PID, pid, &stopped, WSTOPPED | WNOWAIT) == 0);
        CHECK((stopped.si_status & 0x7f) == SIGTRAP);
        CHECK(::ptrace(PTRACE_INTERRUPT, target.pid, nullptr, nullptr) == 0);
        CHECK(wait_for_event_stop(target.pid, std::chrono::seconds(10)));
        CHECK(::ptrace(PTRACE_DETACH, target.pid, nullptr, nullptr) == 0);
        CHECK(ask(target) == 'f');
        stop(target);
    }
}

// A breakpoint of its own is one.
void a_trap_of_the_task_s_own_is_delivered() {
    const Target target = start();
    seize(target.pid);
    CHECK(::ptrace(PTRACE_CONT, target.pid, nullptr, nullptr) == 0);
    CHECK(::kill(target.pid, SIGTRAP) == 0);
    siginfo_t stopped{};
    const auto pid = static_cast<id_t>(target.pid);
    CHECK(::waitid(P_PID, pid, &stopped, WSTOPPED | WNOWAIT) == 0);
    CHECK(stopped.si_status == SIGTRAP);
    CHECK(::ptrace(PTRACE_INTERRUPT, target.pid, nullptr, nullptr) == 0);
    CHECK_THROWS(Errc::io, wait_for_event_stop(target.pid)); // it died of it
    ::close(target.ask);
    ::close(target.answer);
    ::munmap(target.memory, kSize);
}

void a_thawed_thread_runs_and_is_frozen_again() {
    const Target target = start();
    seize(target.pid);
    SharedTaskTable table(OnOrphaned::undo);
    TaskRecord& record = table.add(target.pid);
    fill_record(record, target);
    {
        ThawedThread thawed(record);
        CHECK(ask(target) == 'f');
        thawed.refreeze();
    }
    CHECK(!record.thawed);
    pollfd poll{.fd = target.answer, .events = POLLIN, .revents = 0};
    char byte = '?';
    CHECK(::write(target.ask, &byte, 1) == 1);
    CHECK(::poll(&poll, 1, 50) == 0); // frozen: no answer
    CHECK(::ptrace(PTRACE_DETACH, target.pid, nullptr, nullptr) == 0);
    CHECK(::read(target.answer, &byte, 1) == 1 && byte == 'f');
    stop(target);
}

/// A child that clones itself with CLONE_VFORK when it is asked, and so waits in the kernel for `ms`
/// milliseconds, deaf to any request to stop: as a thread does that hangs in a kernel driver. Not
/// vfork(), which TSan makes a fork() of.
pid_t start_deaf(int ask, unsigned ms) {
    const pid_t pid = ::fork();
    if (pid == 0) {
        ::prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
        char byte = 0;
        if (::read(ask, &byte, 1) != 1)
            ::_exit(1);
        if (::syscall(SYS_clone, CLONE_VFORK | SIGCHLD, nullptr, nullptr, nullptr, 0L) == 0) {
            ::usleep(ms * 1000);
            ::_exit(0);
        }
        for (;;)
            ::pause();
    }
    ::usleep(2000); // into its read
    return pid;
}

void a_thread_that_does_not_stop_is_not_waited_for_without_end() {
    constexpr unsigned kDeafMs = 8000;
    int ask[2];
    CHECK(::pipe(ask) == 0);
    const pid_t pid = start_deaf(ask[0], kDeafMs);
    const std::uint64_t mask = 1U << (SIGUSR1 - 1);
    seize(pid);
    set_signal_mask(pid, mask);
    SharedTaskTable table(OnOrphaned::undo);
    TaskRecord& record = table.add(pid);
    record.pid = record.restore_tid = pid;
    {
        ThawedThread thawed(record, std::chrono::milliseconds(200));
        CHECK(::write(ask[1], "g", 1) == 1);
        CHECK(comes_true([=] { return proc::state(pid) == 'D'; })); // in its vfork
        const auto begin = std::chrono::steady_clock::now();
        CHECK_THROWS(Errc::io, thawed.refreeze());
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::milliseconds(kDeafMs / 2));
        CHECK(record.thawed);
    }
    wait_for_event_stop(pid); // once it hears again
    {
        ThawedThread again(record);
        again.refreeze();
    }
    CHECK(get_signal_mask(pid) == mask); // its own, not the one of a thawed thread
    CHECK(::kill(pid, SIGKILL) == 0);
    CHECK(::waitpid(pid, nullptr, __WALL) == pid);
    ::close(ask[0]);
    ::close(ask[1]);
}

// Who puts memory back before the thread is home loses it again.
void a_call_that_is_still_to_come_is_seen() {
    const Target target = start();
    CHECK(comes_true([&] { return is_home(target.pid, target.pid, SYS_madvise); }));
    SharedTaskTable table(OnOrphaned::undo);
    TaskRecord& record = table.add(target.pid);
    fill_record(record, target);
    const pid_t tracer = fork_child();
    if (tracer == 0) {
        seize(target.pid);
        InjectedSyscalls task({record.pid, record.restore_tid, record.thawed, record.signal_mask});
        task.aim(SYS_madvise, reinterpret_cast<std::uint64_t>(target.memory), kSize, MADV_DONTNEED);
        ::kill(target.pid, SIGSTOP); // the thread takes it on its way to the call
        ::kill(::getpid(), SIGKILL);
    }
    CHECK(::waitpid(tracer, nullptr, 0) == tracer);
    for (int look = 0; look < 100; ++look) {
        CHECK(!is_home(target.pid, target.pid, SYS_madvise));
        ::usleep(1000);
    }
    CHECK(::kill(target.pid, SIGCONT) == 0);
    CHECK(comes_true([&] { return is_home(target.pid, target.pid, SYS_madvise); }));
    reset_signal_mask(record);
    CHECK(ask(target) == 'e');
    const pid_t pid = target.pid;
    stop(target);
    CHECK(is_home(pid, pid, SYS_madvise)); // gone
}

} // namespace

int main() {
    ::signal(SIGPIPE, SIG_IGN);
    a_thread_that_does_not_stop_is_not_waited_for_without_end();
    memory_is_dropped_and_the_task_runs_on();
    a_call_that_is_still_to_come_is_seen();
    a_thawed_thread_runs_and_is_frozen_again();
    a_stop_at_a_system_call_ends_no_task();
    a_trap_of_the_task_s_own_is_delivered();
    the_task_survives_the_tracers_death();
}
