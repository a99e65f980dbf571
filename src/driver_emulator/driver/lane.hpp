// SPDX-License-Identifier: Apache-2.0
/// Copies of custom storage in one stream: a thread of its own does them in their order, so those of
/// different streams overlap. (All else of all streams is done in one order: see stream_order.hpp.)
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>

namespace gpustasis::emulator {

/// Thread-safe. What is in it is done also when its stream is gone.
class Lane {
public:
    /// @param pending counts what all lanes have yet to do; it must live as long as the process
    explicit Lane(std::atomic<std::uint32_t>& pending) noexcept : pending_(pending) {}

    /// Starts a lane with its thread. Returns null if there is no thread to be had; throws
    /// std::bad_alloc.
    static std::shared_ptr<Lane> start(std::atomic<std::uint32_t>& pending);

    /// Queues work, which must not throw, and returns its number: 1, 2, ...
    std::uint64_t submit(std::function<void()> work);

    [[nodiscard]] std::uint64_t submitted() const;
    [[nodiscard]] bool is_done(std::uint64_t number) const;
    void wait(std::uint64_t number) const;

    /// The thread ends when all is done.
    void close();

private:
    void run();

    std::atomic<std::uint32_t>& pending_;
    mutable std::mutex mutex_;
    mutable std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    std::uint64_t submitted_ = 0;
    std::uint64_t done_ = 0;
    bool closed_ = false;
};

/// A moment in a lane.
struct LanePoint {
    std::shared_ptr<Lane> lane; ///< null: before everything
    std::uint64_t number = 0;

    [[nodiscard]] bool is_reached() const { return lane == nullptr || lane->is_done(number); }
    void wait() const {
        if (lane != nullptr) {
            lane->wait(number);
        }
    }
};

} // namespace gpustasis::emulator
