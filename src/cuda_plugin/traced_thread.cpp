// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/traced_thread.hpp"

#include "tracee/proc.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <string>

namespace gpustasis {

bool is_traced_by_us(pid_t tid) noexcept {
    try {
        return proc::tracer_of(tid) == ::getpid();
    } catch (const std::exception&) {
        return false; // it has ended
    }
}

bool has_thread(pid_t pid, pid_t tid) noexcept {
    std::array<char, 64> path{};
    std::snprintf(path.data(), path.size(), "/proc/%d/task/%d", pid, tid);
    struct stat found {};
    return ::stat(path.data(), &found) == 0 || (errno != ENOENT && errno != ESRCH);
}

} // namespace gpustasis
