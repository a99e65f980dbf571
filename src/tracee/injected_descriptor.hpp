// SPDX-License-Identifier: Apache-2.0
/// A descriptor that another process has to make, fetched from it.
#pragma once

#include "core/unique_fd.hpp"
#include "tracee/injected_syscall.hpp"

#include <cstdint>

namespace gpustasis {

/// Have the thread of `calls` make system call `number`, whose result is a descriptor; take a copy of
/// that through `pidfd`, which is of the thread's process, and have the thread close it: the
/// process's table of descriptors is as before. If this process is killed between the call and its
/// being noticed (some microseconds), the descriptor is left open there, unused.
/// If the kernel refuses the call, the result is no descriptor, and errno says why.
/// Throws Error: io. The thread must still be finished with (InjectedSyscalls::finish()).
UniqueFd take_descriptor(InjectedSyscalls& calls, int pidfd, std::uint64_t number,
                         std::uint64_t argument);

} // namespace gpustasis
