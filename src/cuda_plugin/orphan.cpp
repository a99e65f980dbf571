// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/orphan.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <linux/sched.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <string>

namespace gpustasis {
namespace {

/// fork() without SIGCHLD. The kernel is told where the C library keeps the thread's id, as fork()
/// does, or the child would think it had its parent's.
pid_t fork_silently() {
    int* tid_address = nullptr;
    if (::prctl(PR_GET_TID_ADDRESS, &tid_address) != 0)
        throw io_error("prctl(PR_GET_TID_ADDRESS)", errno);
    const long child = ::syscall(SYS_clone, CLONE_CHILD_SETTID | CLONE_CHILD_CLEARTID, nullptr,
                                 nullptr, tid_address, 0L);
    if (child < 0)
        throw io_error("clone", errno);
    return static_cast<pid_t>(child);
}

} // namespace

void fork_orphan(const char* what, const std::function<void()>& body) {
    const pid_t middle = fork_silently();
    if (middle == 0) {
        int status = 0;
        try {
            if (fork_silently() == 0)
                body();
        } catch (...) {
            status = 1;
        }
        ::_exit(status);
    }
    int status = 0;
    pid_t got = 0;
    do
        got = ::waitpid(middle, &status, static_cast<int>(__WCLONE));
    while (got < 0 && errno == EINTR);
    if (got != middle || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        throw Error(Errc::io, std::string("cannot clone ") + what);
}

void shed_criu(std::vector<int> keep, const char* name) {
    for (int signal = 1; signal < NSIG; ++signal)
        ::signal(signal, SIG_DFL);
    sigset_t none;
    sigemptyset(&none);
    ::sigprocmask(SIG_SETMASK, &none, nullptr);
    ::setsid();
    ::prctl(PR_SET_NAME, name, 0, 0, 0);

    const int null = ::open("/dev/null", O_RDWR);
    for (int fd = 0; fd <= STDERR_FILENO; ++fd)
        ::dup2(null, fd);
    std::ranges::sort(keep);
    unsigned next = STDERR_FILENO + 1;
    for (const int fd : keep) {
        if (fd < static_cast<int>(next))
            continue;
        if (static_cast<unsigned>(fd) > next)
            ::close_range(next, static_cast<unsigned>(fd) - 1, 0);
        next = static_cast<unsigned>(fd) + 1;
    }
    ::close_range(next, ~0U, 0);
}

void ignore_requests_to_end() noexcept {
    for (const int signal : {SIGTERM, SIGHUP, SIGINT})
        ::signal(signal, SIG_IGN);
}

} // namespace gpustasis
