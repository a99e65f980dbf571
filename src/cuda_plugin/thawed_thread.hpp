// SPDX-License-Identifier: Apache-2.0
/// Let one frozen thread run for a while: the driver's restore thread, in whose context the
/// driver works.
#pragma once

#include "cuda_plugin/task_table.hpp"

#include <chrono>

namespace gpustasis {

/// The thread must be this process's tracee (PTRACE_SEIZE) and stopped. It runs with every signal
/// but SIGTRAP blocked and with its seccomp filters in force, so that nothing but the driver's
/// work happens to it; signal mask and options are put back when it is frozen again.
/// Only the thread that traces may use this.
class ThawedThread {
public:
    /// `record.restore_tid` is the thread; `patience`: how long refreeze() waits for it to stop. After a
    /// refreeze() that failed, `record` still has the thread's own signal mask, and it is kept.
    /// Throws Error: io.
    explicit ThawedThread(TaskRecord& record, std::chrono::milliseconds patience = kPatience);
    ThawedThread(const ThawedThread&) = delete;
    ThawedThread& operator=(const ThawedThread&) = delete;
    /// Refreezes if refreeze() was not called; errors are lost then, as another is on its way.
    ~ThawedThread();

    /// Stop it in a ptrace event stop, as it was. Throws Error: io, also if it has died, or hangs in
    /// the kernel (after a driver that did not answer, say) and does not stop: `record` then says
    /// that it is thawed.
    void refreeze();

    static constexpr std::chrono::seconds kPatience{10};

private:
    TaskRecord& record_;
    std::chrono::milliseconds patience_;
    bool frozen_ = false;
};

} // namespace gpustasis
