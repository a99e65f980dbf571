#include "cuda_plugin/thawed_thread.hpp"

#include "core/error.hpp"
#include "cuda_plugin/proc.hpp"

#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>
#include <csignal>
#include <string>

namespace cudackpt {
namespace {

// linux/ptrace.h; glibc 2.36 has no names for the first two.
constexpr auto kGetSignalMask = static_cast<__ptrace_request>(0x420a);
constexpr auto kSetSignalMask = static_cast<__ptrace_request>(0x420b);
constexpr long kTraceSysGood = 0x1;
constexpr long kSuspendSeccomp = 0x200000;
constexpr int kEventStop = 128; // PTRACE_EVENT_STOP

void trace(__ptrace_request request, const char* what, pid_t tid, void* address, void* data) {
    if (::ptrace(request, tid, address, data) != 0)
        throw io_error(std::string(what) + " of restore thread " + std::to_string(tid), errno);
}

void* as_pointer(std::uint64_t value) { return reinterpret_cast<void*>(value); }

} // namespace

void wait_for_event_stop(pid_t tid) {
    for (;;) {
        int status = 0;
        const pid_t got = ::waitpid(tid, &status, __WALL);
        if (got < 0 && errno == EINTR)
            continue;
        if (got != tid)
            throw io_error("cannot wait for thread " + std::to_string(tid), errno);
        if (!WIFSTOPPED(status))
            throw Error(Errc::io, "thread " + std::to_string(tid) + " died");
        if (status >> 16 == kEventStop)
            return;
        trace(PTRACE_CONT, "PTRACE_CONT", tid, nullptr,
              as_pointer(static_cast<std::uint64_t>(WSTOPSIG(status))));
    }
}

ThawedThread::ThawedThread(TaskRecord& record) : record_(record) {
    const pid_t tid = record.restore_tid;
    std::uint64_t mask = 0;
    trace(kGetSignalMask, "PTRACE_GETSIGMASK", tid, as_pointer(sizeof(mask)), &mask);
    record_.signal_mask = mask;
    record_.thawed = true;
    std::uint64_t block = ~(std::uint64_t{1} << (SIGTRAP - 1));
    trace(kSetSignalMask, "PTRACE_SETSIGMASK", tid, as_pointer(sizeof(block)), &block);
    trace(PTRACE_SETOPTIONS, "PTRACE_SETOPTIONS", tid, nullptr, nullptr);
    trace(PTRACE_CONT, "PTRACE_CONT", tid, nullptr, nullptr);
}

ThawedThread::~ThawedThread() {
    if (frozen_)
        return;
    try {
        refreeze();
    } catch (const Error&) {
        // Another error is on its way, and that one says more.
    }
}

void ThawedThread::refreeze() {
    frozen_ = true;
    const pid_t tid = record_.restore_tid;
    trace(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", tid, nullptr, nullptr);
    wait_for_event_stop(tid);
    // As CRIU leaves threads when it has seized them (compel's infect.c and ptrace.c).
    const long options = kTraceSysGood | (proc::has_seccomp(tid) ? kSuspendSeccomp : 0);
    trace(PTRACE_SETOPTIONS, "PTRACE_SETOPTIONS", tid, nullptr,
          as_pointer(static_cast<std::uint64_t>(options)));
    std::uint64_t mask = record_.signal_mask;
    trace(kSetSignalMask, "PTRACE_SETSIGMASK", tid, as_pointer(sizeof(mask)), &mask);
    record_.thawed = false;
}

} // namespace cudackpt
