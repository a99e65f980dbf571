// SPDX-License-Identifier: Apache-2.0
#include "tracee/injected_descriptor.hpp"

#include "core/error.hpp"

#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>

namespace gpustasis {

UniqueFd take_descriptor(InjectedSyscalls& calls, int pidfd, std::uint64_t number,
                         std::uint64_t argument) {
    const std::int64_t made = calls.call_if_alive(number, argument);
    if (made < 0) {
        errno = static_cast<int>(-made);
        return UniqueFd();
    }
    calls.aim(SYS_close, static_cast<std::uint64_t>(made), 0, 0);
    UniqueFd ours(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd, made, 0)));
    const int error = errno;
    const std::int64_t closed = calls.run();
    if (!ours)
        throw io_error("pidfd_getfd", error);
    if (closed != 0)
        throw io_error("close in the name of another process", static_cast<int>(-closed));
    return ours;
}

} // namespace gpustasis
