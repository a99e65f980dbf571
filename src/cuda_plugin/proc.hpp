/// What /proc says about a CUDA task.
#pragma once

#include "tracee/proc.hpp"

namespace gpustasis::proc {

/// Whether a thread of the task is named as the driver names its restore thread: "cuda" and more.
/// The driver finds its thread by that name (docs/design.md), so a task without one has no CUDA
/// state that a checkpoint call could reach. "cuda-EvtHandlr" and programs called "cuda..." pass
/// too: the driver has the last word. Throws Error: io if the task is gone.
inline bool has_cuda_thread(pid_t pid) {
    return has_thread_named(pid, "cuda");
}

} // namespace gpustasis::proc
