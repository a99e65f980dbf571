// SPDX-License-Identifier: Apache-2.0
/// Driver calls of several tasks, made side by side.
#pragma once

#include "cuda_plugin/memory_room.hpp"
#include "cuda_plugin/statistics.hpp"
#include "cuda_plugin/worker.hpp"

#include <sys/types.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace gpustasis {

/// Calls that were begun. All have been answered when it is gone.
class CallsUnderWay {
public:
    explicit CallsUnderWay(Worker& worker) noexcept : worker_(worker) {}
    CallsUnderWay(const CallsUnderWay&) = delete;
    CallsUnderWay& operator=(const CallsUnderWay&) = delete;
    ~CallsUnderWay() {
        try {
            while (!calls_.empty())
                next();
        } catch (const std::exception&) {
            calls_.clear(); // without memory for an answer
        }
    }

    /// `number`: which it is, for who waits.
    void add(std::size_t number, const Worker::Call& call) {
        numbers_.push_back(number);
        calls_.push_back(call);
    }
    std::size_t count() const noexcept { return calls_.size(); }

    struct Answer {
        std::size_t number = 0;
        std::exception_ptr error; ///< as of Worker::Answer
        bool lost = false;
        std::chrono::steady_clock::duration waited{}; ///< for this one, after the one before
    };
    /// The first that is answered; there must be one.
    Answer next() {
        const auto begin = std::chrono::steady_clock::now();
        const Worker::Answer found = worker_.wait(calls_);
        const auto at = static_cast<std::ptrdiff_t>(found.index);
        const Answer answer{numbers_[found.index], found.error, found.lost,
                            std::chrono::steady_clock::now() - begin};
        calls_.erase(calls_.begin() + at);
        numbers_.erase(numbers_.begin() + at);
        return answer;
    }

private:
    Worker& worker_;
    std::vector<Worker::Call> calls_;
    std::vector<std::size_t> numbers_;
};

/// What decides how many tasks the driver works in at once.
struct AtOnce {
    std::size_t limit = 1;
    /// Bytes of host memory that item i takes; none: it is not known, and it is worked in alone.
    std::function<std::optional<std::uint64_t>(std::size_t)> memory;
    /// Bytes that are left for item i now.
    std::function<std::uint64_t(std::size_t)> room;
};

/// Have the driver work for items 0 to `count` - 1, as many at once as `at_once` says, one at least. `begin(i)` begins a
/// call, or returns nullopt where there is none to make. `done(answer)` is called in this thread, while others go on.
/// After the first exception of either `failed()` is called, none is begun, all that are under way are waited for, and
/// it is thrown.
template <class Begin, class Done, class Failed>
void side_by_side(Worker& worker, std::size_t count, const AtOnce& at_once, Begin&& begin,
                  Done&& done, Failed&& failed) {
    std::exception_ptr failure;
    CallsUnderWay calls(worker);
    std::map<std::size_t, std::optional<std::uint64_t>> taken; // by those that are under way
    const auto may_begin = [&](std::size_t number) {
        if (calls.count() == 0 || !at_once.memory)
            return calls.count() < at_once.limit || calls.count() == 0;
        std::optional<std::uint64_t> wanted = at_once.memory(number);
        for (const auto& [other, bytes] : taken)
            wanted = wanted && bytes ? std::optional(*wanted + *bytes) : std::nullopt;
        return calls.count() < at_once.limit && wanted && *wanted <= at_once.room(number);
    };
    std::size_t next = 0;
    while (calls.count() != 0 || (!failure && next < count)) {
        try {
            if (!failure && next < count && may_begin(next)) {
                const std::size_t number = next++;
                if (const std::optional<Worker::Call> call = begin(number)) {
                    calls.add(number, *call);
                    taken[number] = at_once.memory ? at_once.memory(number) : 0;
                }
                continue;
            }
            const CallsUnderWay::Answer answer = calls.next();
            taken.erase(answer.number);
            if (!failure)
                done(answer);
        } catch (...) {
            if (failure)
                continue;
            failure = std::current_exception();
            failed();
        }
    }
    if (failure)
        std::rethrow_exception(failure);
}
template <class Begin, class Done>
void side_by_side(Worker& worker, std::size_t count, const AtOnce& at_once, Begin&& begin,
                  Done&& done) {
    side_by_side(worker, count, at_once, std::forward<Begin>(begin), std::forward<Done>(done),
                 [] {});
}

/// Run `body` for task `pid`, while criu asks about `asked`. What it throws names the task, if it is another one.
template <class Body>
auto of_task(pid_t pid, pid_t asked, Body&& body) {
    try {
        return std::forward<Body>(body)();
    } catch (const DriverError& e) {
        if (pid == asked)
            throw;
        throw DriverError(e.result(), "pid " + std::to_string(pid) + ": " + e.what());
    } catch (const Error& e) {
        if (pid == asked)
            throw;
        throw Error(e, "pid " + std::to_string(pid) + ": " + e.what());
    }
}

/// Bytes of memory that process `pid` may still take, with some to spare; of one that is gone, all: whoever begins
/// something with it finds out.
inline std::uint64_t room_of(pid_t pid) {
    constexpr std::uint64_t kSpare = std::uint64_t{64} << 20;
    std::uint64_t room = std::numeric_limits<std::uint64_t>::max();
    try {
        for (const MemoryLevel& level : memory_levels(std::to_string(pid)))
            room = std::min(room, level.room);
    } catch (const Error&) {
        return room;
    }
    return room - std::min(room, kSpare);
}

/// How many tasks the driver is to work in at once: as many as `wish` says, or as there are GPUs or processors. In
/// each it keeps one processor busy, with the pages of the staging, and no GPU (docs/hardware.md).
inline std::size_t tasks_at_once(unsigned wish, const Statistics& statistics) noexcept {
    constexpr std::size_t kUnknown = 8; // GPUs of a machine without NVML
    if (!statistics.in_turn_because.empty())
        return 1;
    if (wish != 0)
        return wish;
    const std::size_t processors = std::thread::hardware_concurrency(); // 0: not known
    return std::max(processors, statistics.gpus.empty() ? kUnknown : statistics.gpus.size());
}

} // namespace gpustasis
