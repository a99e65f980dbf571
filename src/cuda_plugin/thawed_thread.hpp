/// Let one frozen thread run for a while: the driver's restore thread, in whose context the
/// driver works.
#pragma once

#include "cuda_plugin/task_table.hpp"

namespace gpustasis {

/// The thread must be this process's tracee (PTRACE_SEIZE) and stopped. It runs with every signal
/// but SIGTRAP blocked and with its seccomp filters in force, so that nothing but the driver's
/// work happens to it; signal mask and options are put back when it is frozen again.
/// Only the thread that traces may use this.
class ThawedThread {
public:
    /// `record.restore_tid` is the thread. Throws Error: io.
    explicit ThawedThread(TaskRecord& record);
    ThawedThread(const ThawedThread&) = delete;
    ThawedThread& operator=(const ThawedThread&) = delete;
    /// Refreezes if refreeze() was not called; errors are lost then, as another is on its way.
    ~ThawedThread();

    /// Stop it in a ptrace event stop, as it was. Throws Error: io, also if it has died.
    void refreeze();

private:
    TaskRecord& record_;
    bool frozen_ = false;
};

} // namespace gpustasis
