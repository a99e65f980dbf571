// SPDX-License-Identifier: Apache-2.0
/// A thread of a process that is not its first one.
#pragma once

#include "check.hpp"

#include "tracee/proc.hpp"

#include <vector>

/// The first one need not have the lowest id: the kernel begins anew with low ones. TSan has a thread of its
/// own, which does as well.
inline pid_t other_thread(pid_t pid) {
    std::vector<pid_t> tids = gpustasis::proc::threads(pid);
    std::erase(tids, pid);
    CHECK(!tids.empty());
    return tids.back();
}
