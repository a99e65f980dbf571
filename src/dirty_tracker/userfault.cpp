// SPDX-License-Identifier: Apache-2.0
#include "dirty_tracker/userfault.hpp"

#include "core/error.hpp"
#include "tracee/injected_syscall.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/vector_state.hpp"
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
constexpr std::size_t kMaxTries = 8;
constexpr std::uint64_t kMaxGuard = 64U << 10;    // of a thread's stack; a heap's reserve is larger
constexpr std::uint64_t kMinStackLeft = 4U << 10; // beside the way back
constexpr std::uint64_t kUserCode64 = 0x33;       // __USER_CS of a 64-bit program

std::string name_of(pid_t tid) {
    return "thread " + std::to_string(tid);
}

/// A stack that is a program's own making (a coroutine's, a goroutine's) may end right below its
/// stack pointer, in memory that somebody else uses.
bool has_stack_room(const std::vector<Mapping>& maps, std::uint64_t stack, std::uint64_t size) {
    const auto at = std::ranges::find_if(
        maps, [&](const Mapping& m) { return m.start <= stack && stack <= m.end; });
    if (at == maps.end() || stack - at->start < size)
        return false;
    if (at->name == "[stack]")
        return true;
    if (at == maps.begin() || !at->is_private_anonymous())
        return false;
    const Mapping& guard = *std::prev(at);
    return guard.end == at->start && guard.protection == PROT_NONE &&
           guard.end - guard.start <= kMaxGuard;
}

void require_usable(const AddressSpace& space, pid_t tid) {
    user_regs_struct registers{};
    ptrace_call(PTRACE_GETREGS, "PTRACE_GETREGS", tid, nullptr, &registers);
    if (registers.cs != kUserCode64)
        throw Error(Errc::unsupported, name_of(tid) + " runs 32-bit code");
    const std::uint64_t size = way_back_size(read_vector_state(tid)) + kMinStackLeft;
    if (!has_stack_room(space.mappings(), registers.rsp, size))
        throw Error(Errc::unsupported,
                    name_of(tid) + " may have too little stack left for a call in its name");
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

UniqueFd make_in_thread(const AddressSpace& space, pid_t tid, std::uint64_t number,
                        std::uint64_t argument) {
    const SeizedThread seized(tid, kStopTimeout);
    space.require_alive(); // else `tid` may have been another process's by then
    undo_interruption(tid);
    require_usable(space, tid);
    std::atomic<bool> signals_blocked = false;
    std::atomic<std::uint64_t> signal_mask = 0;
    InjectedSyscalls task({space.pid(), tid, signals_blocked, signal_mask});
    if (!task.has_way_back())
        throw Error(Errc::unsupported,
                    name_of(tid) +
                        " could be harmed: its program has no \"syscall; ret\" and signal "
                        "restorer to lead it back should this process be killed, or a "
                        "shadow stack");
    UniqueFd ours = take_descriptor(task, space.pidfd(), number, argument);
    if (!ours)
        throw io_error("system call " + std::to_string(number) + " in the name of " + name_of(tid),
                       errno);
    task.finish();
    return ours;
}

/// On a thread of its own: a thread that could not be stopped is let go of when its tracer ends.
UniqueFd make_on_own_thread(const AddressSpace& space, pid_t tid, std::uint64_t number,
                            std::uint64_t argument) {
    UniqueFd made;
    std::exception_ptr failure;
    std::thread([&] {
        try {
            made = make_in_thread(space, tid, number, argument);
        } catch (...) {
            failure = std::current_exception();
        }
    }).join();
    if (failure)
        std::rethrow_exception(failure);
    return made;
}

bool sleeps(pid_t tid) {
    try {
        return proc::state(tid) == 'S';
    } catch (const Error&) {
        return false; // it has ended
    }
}

/// The main thread first, then those that sleep: they are stopped at once.
std::vector<pid_t> candidates(pid_t pid) {
    std::vector<pid_t> tids = proc::threads(pid);
    std::erase(tids, pid);
    std::vector<pid_t> awake;
    std::erase_if(tids, [&](pid_t tid) {
        if (sleeps(tid))
            return false;
        awake.push_back(tid);
        return true;
    });
    tids.insert(tids.end(), awake.begin(), awake.end());
    tids.insert(tids.begin(), pid);
    tids.resize(std::min(tids.size(), kMaxTries));
    return tids;
}

/// Has a thread of the process make system call `number`, whose result is a descriptor; takes a
/// copy of it and has the thread close it: the process's table of descriptors is as before. One
/// thread is stopped for that time, about a millisecond; what it does goes on after
/// it, also if this process is killed at any instant. At worst, if that instant lies between the
/// call and its being noticed (some microseconds), the descriptor is left open there, unused.
///
/// Takes a thread only if its stack is known to have room for the way back: the main thread, or
/// one whose stack lies above a guard. Throws Error: unsupported, gone, io; the process goes on.
UniqueFd make_descriptor_in(const AddressSpace& space, std::uint64_t number,
                            std::uint64_t argument) {
    Error failure(Errc::gone, "process " + std::to_string(space.pid()) + " has no thread");
    bool failed = false;
    for (const pid_t tid : candidates(space.pid())) {
        try {
            return make_on_own_thread(space, tid, number, argument);
        } catch (const Error& e) {
            if (!failed)
                failure = e; // the main thread's says most
            failed = true;
        }
    }
    space.require_alive();
    throw failure;
}

constexpr std::uint64_t kFeaturePagefaultFlagWp = 1U << 0;
constexpr std::uint64_t kFeatureWpHugetlbfsShmem = 1U << 12;
constexpr std::uint64_t kFeatureWpUnpopulated = 1U << 13;
constexpr std::uint64_t kFeatureWpAsync = 1U << 15;
constexpr std::uint64_t kUserModeOnly = 1; // the process needs no privilege; see below

// Faults are never handled by anybody, so it does not matter that those of the kernel could not be.
constexpr std::uint64_t kFlags = O_CLOEXEC | O_NONBLOCK | kUserModeOnly;

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
    : fd_(space.pid() == ::getpid() ? make_here()
                                    : make_descriptor_in(space, SYS_userfaultfd, kFlags)) {
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
