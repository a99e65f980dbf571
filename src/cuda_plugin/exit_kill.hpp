// SPDX-License-Identifier: Apache-2.0
/// Tasks that are being restored, and lack memory still, do not outlive criu, and it does not let them go.
#pragma once

#include "cuda_plugin/import_slot.hpp"

#include <sys/types.h>

#include <functional>
#include <map>

namespace gpustasis {

/// The kernel kills what this process has attached to by ptrace, should this process end: PTRACE_O_EXITKILL
/// is added to the options that criu asks for. So it holds from the instant that criu attaches, which is
/// before a task can run its own code. Should criu detach from one while memory is missing, which it does if
/// another plugin answers in our place, it is killed first.
class ExitKill {
public:
    /// `before_detach`: criu is about to detach from thread `tid` before end(). Kill it, unless all have been
    /// killed. At most one ExitKill lives. Throws as ImportSlot.
    explicit ExitKill(std::function<void(pid_t tid)> before_detach);
    ExitKill(const ExitKill&) = delete;
    ExitKill& operator=(const ExitKill&) = delete;
    ~ExitKill();

    /// The tasks are complete and stopped: from now on they run on if criu dies.
    void end() noexcept;

private:
    static long ptrace_of_criu(int request, pid_t tid, void* address, void* data) noexcept;

    std::function<void(pid_t)> before_detach_;
    pid_t owner_; ///< children that criu forks have this too, and are free to detach
    std::map<pid_t, long> options_; ///< by thread, as criu asked for them
    ImportSlot slot_;
};

} // namespace gpustasis
