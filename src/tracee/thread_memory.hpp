// SPDX-License-Identifier: Apache-2.0
/// Memory that a thread cannot do without for a moment.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <vector>

namespace gpustasis {

/// Addresses in memory that the threads of process `pid` or the kernel in their name may touch at
/// any instant: of each thread the stack pointer, the thread pointer (fs base), the next instruction,
/// the rseq area and the head of the robust list. Every thread must be a stopped tracee of the caller.
/// Throws Error: io.
std::vector<std::uint64_t> addresses_in_use(pid_t pid);

} // namespace gpustasis
