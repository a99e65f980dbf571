// SPDX-License-Identifier: Apache-2.0
#include "tracee/ptrace.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <exception>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

constexpr int kEventStop = 128; // PTRACE_EVENT_STOP
constexpr useconds_t kPollUs = 100;
constexpr std::chrono::milliseconds kMostPerPoll{10}; // of a limit
constexpr int kMostSlowdown = 4;                      // so many times as long as that, by the clock
// A process may start threads all the time, and one of it stands still meanwhile.
constexpr int kMaxLooks = 8;
constexpr int kMaxEndPolls = 100'000; // 10 s; only this process's own debugger keeps what has ended

/// What a tracee that has stopped is to be given as it goes on: the signal that it has stopped for. 0: none, as at a system
/// call. It stops there for a tracer that asks for none if another one did and was killed when the tracee was about to
/// stop; and then its number is none of a signal, or SIGTRAP, which would end it (ptrace(2), "Syscall-stops").
std::uint64_t signal_to_deliver(pid_t tid, int status) {
    constexpr int kSysGood = 0x80;
    const int signal = WSTOPSIG(status);
    if (status >> 16 != 0 || (signal & kSysGood) != 0)
        return 0;
    if (signal != SIGTRAP)
        return static_cast<std::uint64_t>(signal);
    siginfo_t info{};
    ptrace_call(PTRACE_GETSIGINFO, "PTRACE_GETSIGINFO", tid, nullptr, &info);
    return (info.si_code & ~kSysGood) == SIGTRAP ? 0 : SIGTRAP;
}

/// One stop of the tracee: true if it is the event stop, else it has been sent on its way.
bool take_stop(pid_t tid, int status) {
    if (!WIFSTOPPED(status))
        throw Error(Errc::io, "thread " + std::to_string(tid) + " died");
    if (is_event_stop(status))
        return true;
    ptrace_call(PTRACE_CONT, "PTRACE_CONT", tid, nullptr,
                reinterpret_cast<void*>(signal_to_deliver(tid, status)));
    return false;
}

bool has_ended(pid_t tid) {
    try {
        const char state = proc::state(tid);
        return state == 'Z' || state == 'X';
    } catch (const Error&) {
        return true;
    }
}

/// Seize what of `tids` is not in `seized` yet. False: another process traces one of them.
bool seize_all(const std::vector<pid_t>& tids, std::vector<pid_t>& seized) {
    for (const pid_t tid : tids) {
        if (std::ranges::find(seized, tid) != seized.end())
            continue;
        if (::ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) != 0 && !has_ended(tid))
            return false;
        seized.push_back(tid);
    }
    return true;
}

/// Seize all threads of process `pid` but those in `seized`. False: another process traces one of them, or
/// there is no end to them.
bool seize_process(pid_t pid, std::vector<pid_t> seized) {
    for (int look = 0; look < kMaxLooks; ++look) {
        const std::size_t before = seized.size();
        if (!seize_all(proc::threads(pid), seized))
            return false;
        if (seized.size() == before) // one that it had not seized yet may have started another
            return true;
    }
    return false;
}

constexpr std::uint64_t kTraceSysGood = 0x1;
constexpr std::uint64_t kSuspendSeccomp = 0x200000;

} // namespace

bool is_event_stop(int status) noexcept {
    return status >> 16 == kEventStop;
}

void wait_for_event_stop(pid_t tid) {
    for (;;) {
        int status = 0;
        const pid_t got = ::waitpid(tid, &status, __WALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got != tid)
            throw io_error("cannot wait for thread " + std::to_string(tid), errno);
        if (take_stop(tid, status))
            return;
    }
}

bool wait_for_event_stop(pid_t tid, std::chrono::milliseconds timeout) {
    using Clock = std::chrono::steady_clock;
    Clock::duration left = timeout;
    Clock::duration left_at_most = kMostSlowdown * timeout;
    for (auto looked = Clock::now();;) {
        int status = 0;
        const pid_t got = ::waitpid(tid, &status, __WALL | WNOHANG);
        if (got < 0 && errno != EINTR)
            throw io_error("cannot wait for thread " + std::to_string(tid), errno);
        if (got == tid && take_stop(tid, status))
            return true;
        if (got != 0)
            continue;
        if (std::min(left, left_at_most) <= Clock::duration::zero()) // and it was looked since
            return false;
        ::usleep(kPollUs);
        const auto before = std::exchange(looked, Clock::now());
        const Clock::duration passed = looked - before;
        left -= std::min<Clock::duration>(passed, kMostPerPoll);
        left_at_most -= std::min<Clock::duration>(passed, timeout);
    }
}

SeizedThread::SeizedThread(pid_t tid, std::chrono::milliseconds timeout) : tid_(tid) {
    const std::string name = "thread " + std::to_string(tid);
    const bool has_seccomp = proc::has_seccomp(tid);
    const std::uint64_t options = kTraceSysGood | (has_seccomp ? kSuspendSeccomp : 0);
    if (::ptrace(PTRACE_SEIZE, tid, nullptr, reinterpret_cast<void*>(options)) != 0) {
        const int error = errno;
        if (const pid_t tracer = proc::tracer_of(tid); tracer != 0)
            throw Error(Errc::unsupported,
                        name + " is traced by process " + std::to_string(tracer) + " already");
        if (has_seccomp)
            throw Error(Errc::unsupported,
                        name + " runs under seccomp, whose filters cannot be suspended "
                               "(PTRACE_O_SUSPEND_SECCOMP needs CAP_SYS_ADMIN)");
        throw io_error("PTRACE_SEIZE of " + name, error);
    }
    ptrace_call(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", tid, nullptr, nullptr);
    if (!wait_for_event_stop(tid, timeout))
        throw Error(Errc::io, name + " does not stop within " + std::to_string(timeout.count()) +
                                  " ms: it waits in the kernel for something else");
}

SeizedThread::~SeizedThread() {
    ::ptrace(PTRACE_DETACH, tid_, nullptr, nullptr);
}

bool others_are_traced(pid_t pid, pid_t but) {
    bool all = false;
    long tracer = 0;
    std::atomic<bool> is_done = false;
    std::exception_ptr failure;
    // On a thread of its own: what is not stopped is let go of only by the end of its tracer.
    std::thread seizing;
    try {
        seizing = std::thread([&] {
            tracer = ::syscall(SYS_gettid);
            try {
                all = seize_process(pid, {but});
            } catch (...) {
                failure = std::current_exception();
            }
            is_done = true;
        });
    } catch (const std::system_error& e) {
        throw io_error("cannot start a thread", e.code().value());
    }
    // If one of them executes another program, the kernel kills `but`, has that one wait until somebody has
    // waited for it, and PTRACE_SEIZE wait for that one. Its main thread it does not wait for.
    while (!is_done) {
        ::usleep(kPollUs);
        if (but != pid)
            ::waitpid(but, nullptr, __WALL | WNOHANG);
    }
    seizing.join();
    // It is joined before it lets go of them, and gone after that.
    for (int poll = 0; poll < kMaxEndPolls && ::syscall(SYS_tgkill, ::getpid(), tracer, 0) == 0;
         ++poll)
        ::usleep(kPollUs);
    if (failure)
        std::rethrow_exception(failure);
    return !all;
}

} // namespace gpustasis
