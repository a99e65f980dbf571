// SPDX-License-Identifier: Apache-2.0
/// Processes in which userfaultfds are made, and makers that are killed meanwhile.
#pragma once

#include "check.hpp"
#include "child.hpp"

#include "tracee/ptrace.hpp"
#include "tracee/task_identity.hpp"
#include "tracee/userfaultfd_record.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <ctime>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace makers {

using namespace gpustasis;

inline constexpr std::chrono::seconds kStop{10};
inline constexpr std::uint64_t kUserModeOnly = 1;
inline constexpr std::uint64_t kFlags = kUserfaultfdFlags | kUserModeOnly;
inline constexpr uid_t kUser = 65534;

inline void make_own(int signal) {
    const long made = ::syscall(SYS_userfaultfd, kFlags);
    uffdio_api api{};
    api.api = UFFD_API;
    if (signal == SIGUSR2)
        static_cast<void>(::ioctl(static_cast<int>(made), UFFDIO_API, &api));
}

inline void make_blocking(int /*signal*/) {
    static_cast<void>(::syscall(SYS_userfaultfd, O_CLOEXEC | kUserModeOnly));
}

inline void replace_all(int signal) {
    const int highest = signal == SIGHUP ? ::open("/dev/null", O_RDONLY)
                                         : static_cast<int>(::syscall(SYS_userfaultfd, kFlags));
    for (int fd = 3; fd < highest; ++fd)
        ::dup3(highest, fd, O_CLOEXEC); // as ours is
    ::dup(highest);
}

/// Makes a userfaultfd of its own at SIGUSR1, one that it uses at SIGUSR2, and one with other flags than ours
/// at SIGALRM. Under the numbers of all its descriptors it has another file at SIGHUP, and a userfaultfd of
/// its own at SIGWINCH.
inline void prepare() {
    ::signal(SIGUSR1, make_own);
    ::signal(SIGUSR2, make_own);
    ::signal(SIGALRM, make_blocking);
    ::signal(SIGHUP, replace_all);
    ::signal(SIGWINCH, replace_all);
}

inline void prepare_two_threads() {
    prepare();
    std::thread([] {
        for (;;)
            ::pause();
    }).detach();
}

inline std::size_t descriptors(pid_t pid) {
    const std::filesystem::directory_iterator all("/proc/" + std::to_string(pid) + "/fd");
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

inline void tell(pid_t pid, int signal) {
    const std::size_t before = descriptors(pid);
    CHECK(::kill(pid, signal) == 0);
    CHECK(comes_true([=] { return descriptors(pid) == before + 1; }));
}

inline std::string file_of(const std::string& base, pid_t pid) {
    return base + "/gpustasis/userfaultfd/" + file_name(identify_task(pid));
}

inline bool is_record(const std::string& base, pid_t pid) {
    struct stat status {};
    return ::stat(file_of(base, pid).c_str(), &status) == 0 && status.st_size != 0;
}

inline void make_older(const std::string& base, pid_t pid) {
    timespec times[2]{};
    ::clock_gettime(CLOCK_REALTIME, &times[1]);
    times[1].tv_sec -= 10;
    times[0] = times[1];
    CHECK(::utimensat(AT_FDCWD, file_of(base, pid).c_str(), times, 0) == 0);
}

/// The number that it has closed.
inline std::optional<int> close_what_is_left(UserfaultfdRecord& record, InjectedSyscalls& calls,
                                             pid_t pid, pid_t tid) {
    const std::vector<UnusedUserfaultfd> left = record.find_left();
    CHECK(left.size() <= 1);
    if (left.empty() || others_are_traced(pid, tid) || !record.close_left(left[0], calls))
        return std::nullopt;
    return left[0].fd;
}

/// What a tracker does: a descriptor is made, taken and closed. The number of what was left, and
/// is closed before.
inline std::optional<int> attach(const std::string& base, pid_t pid) {
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    UserfaultfdRecord record(pid, IfMissing::make, base);
    const SeizedThread seized(pid, kStop);
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    InjectedSyscalls calls({pid, pid, blocked, mask});
    const auto closed = close_what_is_left(record, calls, pid, pid);
    record.begin();
    const UniqueFd made = take_descriptor(calls, pidfd.get(), SYS_userfaultfd, kFlags);
    CHECK(static_cast<bool>(made));
    record.end();
    calls.finish();
    return closed;
}

enum class At {
    begun, ///< the record is written, nothing is made yet
    made,  ///< the descriptor is there, and not closed
};

/// Another process that borrows thread `tid` and comes so far, until it is killed.
class Maker {
public:
    Maker(const std::string& base, pid_t pid, At at, uid_t user = ::geteuid())
        : Maker(base, pid, at, pid, user) {}
    Maker(const std::string& base, pid_t pid, At at, pid_t tid, uid_t user)
        : child_([&, pid, tid, at, user] {
              if (user != ::geteuid())
                  become(user);
              record.emplace(pid, IfMissing::make, base);
              thread.emplace(tid, kStop);
              calls.emplace(BorrowedThread{pid, tid, blocked, mask});
              CHECK(calls->has_way_back());
              close_what_is_left(*record, *calls, pid, tid);
              record->begin();
              if (at == At::made)
                  CHECK(calls->call_if_alive(SYS_userfaultfd, kFlags) >= 0);
          }) {}
    void kill() { child_.end(); }

private:
    // The child's own, which it never destroys.
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    std::optional<UserfaultfdRecord> record;
    std::optional<SeizedThread> thread;
    std::optional<InjectedSyscalls> calls;
    Child child_;
};

} // namespace makers
