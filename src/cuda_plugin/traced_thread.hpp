// SPDX-License-Identifier: Apache-2.0
/// Small helpers around threads that this process traces.
#pragma once

#include "cuda_plugin/worker.hpp"

#include <sys/types.h>

namespace gpustasis {

/// Whether thread `tid` exists and this process is its tracer.
bool is_traced_by_us(pid_t tid) noexcept;

/// Whether process `pid` has thread `tid` now.
bool has_thread(pid_t pid, pid_t tid) noexcept;

/// Has `worker` give up a call when the thread dies or stops, for as long as this lives.
class WatchedThread {
public:
    WatchedThread(Worker& worker, pid_t tid) noexcept : worker_(worker) { worker_.watch(tid); }
    WatchedThread(const WatchedThread&) = delete;
    WatchedThread& operator=(const WatchedThread&) = delete;
    ~WatchedThread() { worker_.watch(0); }

private:
    Worker& worker_;
};

} // namespace gpustasis
