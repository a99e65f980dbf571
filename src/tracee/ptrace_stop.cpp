// SPDX-License-Identifier: Apache-2.0
#include "tracee/ptrace_stop.hpp"

#include "core/error.hpp"
#include "tracee/ptrace_call.hpp"

#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <string>

namespace gpustasis {
namespace {

constexpr int kEventStop = 128; // PTRACE_EVENT_STOP
constexpr useconds_t kPollUs = 100;

/// One stop of the tracee: true if it is the event stop, else it has been sent on its way.
bool take_stop(pid_t tid, int status) {
    if (!WIFSTOPPED(status))
        throw Error(Errc::io, "thread " + std::to_string(tid) + " died");
    if (is_event_stop(status))
        return true;
    const auto signal = static_cast<std::uint64_t>(WSTOPSIG(status));
    ptrace_call(PTRACE_CONT, "PTRACE_CONT", tid, nullptr, reinterpret_cast<void*>(signal));
    return false;
}

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
    const auto deadline = std::chrono::steady_clock::now() + timeout;
    for (;;) {
        int status = 0;
        const pid_t got = ::waitpid(tid, &status, __WALL | WNOHANG);
        if (got < 0 && errno != EINTR)
            throw io_error("cannot wait for thread " + std::to_string(tid), errno);
        if (got == tid && take_stop(tid, status))
            return true;
        if (got == 0) {
            if (std::chrono::steady_clock::now() > deadline)
                return false;
            ::usleep(kPollUs);
        }
    }
}

} // namespace gpustasis
