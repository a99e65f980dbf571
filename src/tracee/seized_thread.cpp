// SPDX-License-Identifier: Apache-2.0
#include "tracee/seized_thread.hpp"

#include "tracee/proc.hpp"
#include "tracee/ptrace_call.hpp"
#include "tracee/ptrace_stop.hpp"

#include <cerrno>

namespace gpustasis {
namespace {

constexpr std::uint64_t kTraceSysGood = 0x1;
constexpr std::uint64_t kSuspendSeccomp = 0x200000;

} // namespace

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

} // namespace gpustasis
