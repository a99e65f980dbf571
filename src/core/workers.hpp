// SPDX-License-Identifier: Apache-2.0
/// Run one piece of work on several threads, and tell how far it is.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <functional>
#include <mutex>

namespace gpustasis {

/// What threads mostly wait for.
enum class Waits : std::uint8_t {
    processor,
    device, ///< direct I/O: while one waits, others can keep processors and device busy
};

/// How many threads to use for `jobs` jobs: `wanted`, or if that is 0 as many as there are
/// processors to run on, and eight times that (at most 64) where they wait for a device; never more than
/// there are jobs; at least 1.
unsigned worker_count(unsigned wanted, std::uint64_t jobs, Waits waits = Waits::processor) noexcept;

/// The first failure of several threads, which tells the others to stop.
class FirstFailure {
public:
    /// Keep the exception being handled, unless there is one already. Call from a catch block.
    void record() noexcept;
    bool any() const noexcept { return any_.load(std::memory_order_acquire); }
    /// Throw what was recorded, if anything was.
    void rethrow() const;

private:
    std::mutex mutex_;
    std::exception_ptr first_;
    std::atomic<bool> any_ = false;
};

/// Run `work` on the calling thread and `count` - 1 others, and wait for all of them. Where the
/// system gives fewer threads, those do all the work: `work` takes jobs until there are none, and
/// returns early once `failure.any()`. What it throws is recorded in `failure`, and the first is
/// thrown when all have returned. The other threads block all signals: they run inside programs
/// that expect theirs elsewhere.
void run_workers(unsigned count, FirstFailure& failure, const std::function<void()>& work);

/// Counts bytes from all workers and tells somebody now and then, from one thread at a time.
class ProgressMeter {
public:
    using Tell = std::function<void(std::uint64_t done)>;

    /// `tell` may be empty; it must outlive this.
    explicit ProgressMeter(const Tell& tell) : tell_(tell) {}

    /// `size` bytes more are done.
    void add(std::uint64_t size) {
        const std::uint64_t done = done_.fetch_add(size, std::memory_order_relaxed) + size;
        if (!tell_ || done / kStep == (done - size) / kStep)
            return;
        const std::lock_guard lock(mutex_);
        // Another worker may have told a later state while this one waited.
        if (done > told_) {
            told_ = done;
            tell_(done);
        }
    }
    /// Tell the whole, unless it was told.
    void finish() {
        if (tell_ && done_ != told_)
            tell_(done_);
    }

private:
    // How much memory goes by between two calls.
    static constexpr std::uint64_t kStep = 16U << 20;

    const Tell& tell_;
    std::atomic<std::uint64_t> done_ = 0;
    std::mutex mutex_;
    std::uint64_t told_ = 0;
};

} // namespace gpustasis
