// SPDX-License-Identifier: Apache-2.0
/// Progress of work that several threads share.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>

namespace gpustasis {

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
