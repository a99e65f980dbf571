// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/thawed_thread.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <cstdint>

namespace gpustasis {
namespace {

constexpr long kTraceSysGood = 0x1;
constexpr long kSuspendSeccomp = 0x200000;

void* as_pointer(std::uint64_t value) {
    return reinterpret_cast<void*>(value);
}

} // namespace

ThawedThread::ThawedThread(TaskRecord& record, std::chrono::milliseconds patience)
    : record_(record), patience_(patience) {
    const pid_t tid = record.restore_tid;
    if (!record_.thawed)
        record_.signal_mask = get_signal_mask(tid);
    record_.thawed = true;
    set_signal_mask(tid, kAllButSigtrap);
    ptrace_call(PTRACE_SETOPTIONS, "PTRACE_SETOPTIONS", tid, nullptr, nullptr);
    ptrace_call(PTRACE_CONT, "PTRACE_CONT", tid, nullptr, nullptr);
}

ThawedThread::~ThawedThread() {
    if (frozen_)
        return;
    try {
        refreeze();
    } catch (const Error& e) {
        host::debug(e.what()); // another error is on its way, and that one says more
    }
}

void ThawedThread::refreeze() {
    frozen_ = true;
    const pid_t tid = record_.restore_tid;
    ptrace_call(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", tid, nullptr, nullptr);
    if (!wait_for_event_stop(tid, patience_))
        throw Error(Errc::io, "thread " + std::to_string(tid) + " does not stop within " +
                                  std::to_string(patience_.count()) +
                                  " ms: it hangs in the kernel, inside the driver");
    // As CRIU leaves threads when it has seized them (compel's infect.c and ptrace.c).
    const long options = kTraceSysGood | (proc::has_seccomp(tid) ? kSuspendSeccomp : 0);
    ptrace_call(PTRACE_SETOPTIONS, "PTRACE_SETOPTIONS", tid, nullptr,
                as_pointer(static_cast<std::uint64_t>(options)));
    set_signal_mask(tid, record_.signal_mask);
    record_.thawed = false;
}

} // namespace gpustasis
