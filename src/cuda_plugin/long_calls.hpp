// SPDX-License-Identifier: Apache-2.0
/// What a worker does for tasks that may take long, or hang: each in a thread of its own.
#pragma once

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <memory>
#include <vector>

namespace gpustasis {

/// Call from one thread. Nobody waits for the threads: all that they use must be there until the process ends, by
/// _exit().
class LongCalls {
public:
    /// Do `work`, which must throw nothing, for task `pid`. From `limit` on it hangs. Throws std::system_error if there can
    /// be no thread.
    void begin(pid_t pid, std::chrono::milliseconds limit, std::function<void()> work);

    /// Whether one of that task has not ended within its limit.
    bool hangs(pid_t pid) const noexcept;

    /// Whether any has not ended, and does not hang.
    bool any_works() const noexcept;

private:
    struct Call {
        pid_t pid = 0;
        std::chrono::steady_clock::time_point until;
        std::shared_ptr<std::atomic<bool>> has_ended;
    };

    std::vector<Call> calls_;
};

} // namespace gpustasis
