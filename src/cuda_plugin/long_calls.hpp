// SPDX-License-Identifier: Apache-2.0
/// What a worker does for tasks that may take long, or hang: each in a thread of its own.
#pragma once

#include "device_memory/device_copy.hpp"

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
    /// Do `work`, which must throw nothing, for task `pid`. It hangs if for `limit` neither it nor any other has ended, or
    /// moved memory: a driver may do one after the other. `moved_at`, if given, says when this one did last, and is there
    /// until the process ends. Throws std::system_error if there can be no thread.
    void begin(pid_t pid, std::chrono::milliseconds limit, std::function<void()> work,
               const MovedAt* moved_at = nullptr);

    /// That task has died: what is under way in it hangs if it does not end soon, for it may never.
    void give_up(pid_t pid) noexcept;

    /// From now on calls are looked at, and this is called, several times a second. If seconds go by in between, this
    /// process was stopped, and the driver with it, as by the freezer of a control group: no call's time has passed.
    void begin_turn() noexcept;

    /// Whether one of that task hangs.
    bool hangs(pid_t pid) noexcept;

    /// Whether one of that task has not ended, hangs or not.
    bool is_in(pid_t pid) const noexcept;

    /// Whether any has not ended, and does not hang.
    bool any_works() noexcept;

private:
    using Clock = std::chrono::steady_clock;
    struct Call {
        pid_t pid = 0;
        Clock::time_point begin;
        Clock::duration limit{};
        const MovedAt* moved_at = nullptr;
        std::shared_ptr<std::atomic<bool>> has_ended;
        bool was_found_hanging =
            false; ///< and does so until it ends, whatever other ends behind it
    };

    bool hangs(Call& call) noexcept;
    void see_stop() noexcept;

    Clock::time_point turn_{}; ///< when the last one began
    std::vector<Call> calls_;
    /// When one has ended, or this process went on.
    std::shared_ptr<std::atomic<Clock::rep>> last_end_ =
        std::make_shared<std::atomic<Clock::rep>>(0);
};

} // namespace gpustasis
