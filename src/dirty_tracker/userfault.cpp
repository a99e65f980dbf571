// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/userfault.hpp"

#include "core/error.hpp"
#include "tracee/injected_syscall.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/userfaultfd_record.hpp"
#include "tracee/way_back.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <exception>
#include <string>
#include <thread>
#include <vector>

namespace gpustasis {
namespace {

constexpr std::chrono::milliseconds kStopTimeout{300};
constexpr int kMoreTries = 9; // of one that may only have no processor
constexpr std::size_t kMaxTries = 8;
constexpr int kMaxLooks = 500;             // for a thread to be let go of, a millisecond each
constexpr std::uint64_t kUserModeOnly = 1; // the process needs no privilege; see below
// Faults are never handled by anybody, so it does not matter that those of the kernel could not be.
constexpr std::uint64_t kFlags = kUserfaultfdFlags | kUserModeOnly;

std::string name_of(pid_t tid) {
    return "thread " + std::to_string(tid);
}

/// Some calls (epoll_wait, sigtimedwait and others, see signal(7)) end with EINTR where a thread is
/// stopped, and nothing has the kernel make them again. If it was not a signal, it was us: have the
/// call made again, with all of its time. Before anything else is done with the thread.
void undo_interruption(pid_t tid) {
    user_regs_struct registers{};
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &registers);
    if (static_cast<std::int64_t>(registers.orig_rax) < 0 ||
        static_cast<std::int64_t>(registers.rax) != -EINTR || proc::has_signal(tid))
        return;
    constexpr std::uint64_t kSyscallSize = 2;
    registers.rax = registers.orig_rax;
    registers.rip -= kSyscallSize;
    registers.orig_rax = ~0ULL; // as it is outside of a call
    ptrace_call(PTRACE_SETREGS, "PTRACE_SETREGS", tid, nullptr, &registers);
}

/// What a tracker, or a dump, that was killed has left. That this fails harms nobody.
void close_left(UserfaultfdRecord& record, InjectedSyscalls& task, pid_t pid, pid_t tid) {
    try {
        const std::vector<UnusedUserfaultfd> found = record.find_left();
        if (found.empty() || others_are_traced(pid, tid))
            return;
        for (const UnusedUserfaultfd& left : found)
            record.close_left(left, task);
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): the next one tries again
    }
}

UniqueFd make_in_thread(const AddressSpace& space, UserfaultfdRecord& record, pid_t tid) {
    const SeizedThread seized(tid, kStopTimeout);
    space.require_alive(); // else `tid` may have been another process's by then
    undo_interruption(tid);
    require_room_for_way_back(space.mappings(), tid);
    std::atomic<bool> signals_blocked = false;
    std::atomic<std::uint64_t> signal_mask = 0;
    InjectedSyscalls task({space.pid(), tid, signals_blocked, signal_mask});
    if (!task.has_way_back())
        throw Error(Errc::unsupported,
                    name_of(tid) +
                        " could be harmed: its program has no \"syscall; ret\" and signal "
                        "restorer to lead it back should this process be killed, or a "
                        "shadow stack");
    close_left(record, task, space.pid(), tid);
    record.begin();
    UniqueFd ours = take_descriptor(task, space.pidfd(), SYS_userfaultfd, kFlags);
    const int error = errno;
    record.end();
    if (!ours)
        throw io_error("userfaultfd in the name of " + name_of(tid), error);
    task.finish();
    return ours;
}

/// On a thread of its own: a thread that could not be stopped is let go of when its tracer ends.
UniqueFd make_on_own_thread(const AddressSpace& space, UserfaultfdRecord& record, pid_t tid) {
    UniqueFd made;
    std::exception_ptr failure;
    std::thread([&] {
        try {
            made = make_in_thread(space, record, tid);
        } catch (...) {
            failure = std::current_exception();
        }
    }).join();
    if (failure)
        std::rethrow_exception(failure);
    return made;
}

bool is_in(char state, pid_t tid) {
    try {
        return proc::state(tid) == state;
    } catch (const Error&) {
        return false; // it has ended
    }
}

/// The same, once the thread that traced it, and has been joined, is gone.
bool is_let_go_in_state(char state, pid_t tid) {
    try {
        for (int looks = 0; proc::tracer_of(tid) != 0; ++looks) {
            if (looks == kMaxLooks)
                return false; // another one traces it
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
    } catch (const Error&) {
        return false;
    }
    return is_in(state, tid);
}

/// The main thread first, then those that sleep: they are stopped at once.
std::vector<pid_t> candidates(pid_t pid) {
    std::vector<pid_t> tids = proc::threads(pid);
    std::erase(tids, pid);
    std::vector<pid_t> awake;
    std::erase_if(tids, [&](pid_t tid) {
        if (is_in('S', tid))
            return false;
        awake.push_back(tid);
        return true;
    });
    tids.insert(tids.end(), awake.begin(), awake.end());
    tids.insert(tids.begin(), pid);
    tids.resize(std::min(tids.size(), kMaxTries));
    return tids;
}

/// Has a thread of the process make a userfaultfd; takes a copy of it and has the thread close it: the
/// process's table of descriptors is as before. One thread is stopped for that time, about a
/// millisecond; what it does goes on after it, also if this process is killed at any instant. At
/// worst, if that instant lies between the call and its being noticed, the descriptor is left open
/// there, unused, until another tracker or a dump comes (UserfaultfdRecord).
///
/// Takes a thread only if its stack is known to have room for the way back: the main thread, or
/// one whose stack lies above a guard. Throws Error: unsupported, gone, io; the process goes on.
UniqueFd make_in_process(const AddressSpace& space) {
    UserfaultfdRecord record(space.pid(), IfMissing::make); // no thread is stopped yet
    Error failure(Errc::gone, "process " + std::to_string(space.pid()) + " has no thread");
    bool failed = false;
    for (const pid_t tid : candidates(space.pid())) {
        try {
            return make_on_own_thread(space, record, tid);
        } catch (const Error& e) {
            if (!failed)
                failure = e; // the main thread's says most
            failed = true;
        }
    }
    space.require_alive();
    // Where all others are in the kernel it may yet only have had no processor. In between, others can take it.
    for (int more = 0; more < kMoreTries && is_let_go_in_state('R', space.pid()); ++more)
        try {
            return make_on_own_thread(space, record, space.pid());
        } catch (const Error&) { // NOLINT(bugprone-empty-catch): the first failure says most
        }
    throw failure;
}

constexpr std::uint64_t kFeaturePagefaultFlagWp = 1U << 0;
constexpr std::uint64_t kFeatureWpHugetlbfsShmem = 1U << 12;
constexpr std::uint64_t kFeatureWpUnpopulated = 1U << 13;
constexpr std::uint64_t kFeatureWpAsync = 1U << 15;

UniqueFd make_here() {
    UniqueFd fd(static_cast<int>(::syscall(SYS_userfaultfd, kFlags)));
    if (!fd && errno == ENOSYS)
        throw Error(Errc::unsupported, "this kernel has no userfaultfd");
    if (!fd)
        throw io_error("userfaultfd", errno);
    return fd;
}

} // namespace

Userfault::Userfault(const AddressSpace& space)
    : fd_(space.pid() == ::getpid() ? make_here() : make_in_process(space)) {
    uffdio_api api{};
    api.api = UFFD_API;
    api.features = kFeaturePagefaultFlagWp | kFeatureWpHugetlbfsShmem | kFeatureWpUnpopulated |
                   kFeatureWpAsync;
    if (::ioctl(fd_.get(), UFFDIO_API, &api) != 0)
        throw errno == EINVAL
            ? Error(Errc::unsupported, "this kernel's userfaultfd cannot write-protect "
                                       "asynchronously (Linux 6.7 and later can)")
            : io_error("UFFDIO_API", errno);
}

bool Userfault::add(std::uint64_t start, std::uint64_t end) {
    uffdio_register range{};
    range.range = {.start = start, .len = end - start};
    range.mode = UFFDIO_REGISTER_MODE_WP;
    if (::ioctl(fd_.get(), UFFDIO_REGISTER, &range) == 0)
        return true;
    // ENOMEM: its address space is no more, or it has as many mappings as it may have.
    if (errno == EBUSY || errno == EPERM || errno == EINVAL || errno == ENOMEM)
        return false;
    throw io_error("UFFDIO_REGISTER", errno);
}

void Userfault::remove(std::uint64_t start, std::uint64_t end) noexcept {
    uffdio_range range{.start = start, .len = end - start};
    ::ioctl(fd_.get(), UFFDIO_UNREGISTER, &range);
}

} // namespace gpustasis
