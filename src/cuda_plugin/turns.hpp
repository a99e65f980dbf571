// SPDX-License-Identifier: Apache-2.0
/// One of LongCalls after the other.
#pragma once

#include "cuda_plugin/long_calls.hpp"

#include <sys/types.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <memory>
#include <string>

namespace gpustasis {

/// What came of work in a thread of LongCalls.
struct Outcome {
    const std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    std::atomic<bool> is_there = false;
    std::string error; ///< why it was not done; empty: it was
};

/// What fails in a task, again and again.
struct Failing {
    std::chrono::steady_clock::time_point since = std::chrono::steady_clock::now();
    int count = 0;
    bool is_given_up = false; ///< nobody waits for the task
    std::string why;
};

/// Work for one task after the other, as tasks that share memory need it. Call from one thread.
class Turns {
public:
    /// `calls` outlives this. `limit`: of one's work; then it hangs.
    Turns(LongCalls& calls, std::chrono::milliseconds limit) noexcept
        : calls_(calls), limit_(limit) {}

    /// What came of it; nullptr: it is not done yet, and is begun if it may be, and no other is under way. `work` may
    /// throw std::exception, which is its outcome. Throws std::bad_alloc.
    /// `moved_at`: as of LongCalls.
    const Outcome* take(pid_t pid, bool may_begin, std::function<void()> work,
                        const MovedAt* moved_at = nullptr);
    /// The next take() begins anew. Not while it is under way.
    void forget(pid_t pid) noexcept { outcomes_.erase(pid); }
    bool is_begun(pid_t pid) const { return outcomes_.contains(pid) && outcomes_.at(pid); }
    bool is_under_way(pid_t pid) const { return is_begun(pid) && !outcomes_.at(pid)->is_there; }

private:
    void begin(pid_t pid, std::shared_ptr<Outcome>& outcome, std::function<void()> work,
               const MovedAt* moved_at);

    LongCalls& calls_;
    std::chrono::milliseconds limit_;
    std::map<pid_t, std::shared_ptr<Outcome>> outcomes_;
};

} // namespace gpustasis
