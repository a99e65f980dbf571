// SPDX-License-Identifier: Apache-2.0
/// Places in a file for chunks that several threads make.
#pragma once

#include "core/image_format.hpp"

#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <optional>

namespace gpustasis {

/// Gives chunks their places in the order of their numbers, whichever thread is ready first: this
/// is what makes the file the same for any number of threads.
class PlaceInOrder {
public:
    PlaceInOrder(std::uint64_t begin, std::uint64_t alignment)
        : end_(begin), alignment_(alignment) {}

    /// The offset of chunk `index`, once all chunks before it have theirs. nullopt: cancelled.
    std::optional<std::uint64_t> take(std::uint64_t index, std::uint64_t stored_size) {
        std::unique_lock lock(mutex_);
        moved_.wait(lock, [&] { return next_ == index || cancelled_; });
        if (cancelled_)
            return std::nullopt;
        const std::uint64_t offset = end_;
        end_ = format::align_up(end_ + stored_size, alignment_);
        ++next_;
        lock.unlock();
        moved_.notify_all();
        return offset;
    }
    void cancel() noexcept {
        {
            const std::lock_guard lock(mutex_);
            cancelled_ = true;
        }
        moved_.notify_all();
    }
    /// Where the last chunk and its padding end. Once all threads are done.
    std::uint64_t end() const noexcept { return end_; }

private:
    std::mutex mutex_;
    std::condition_variable moved_;
    std::uint64_t next_ = 0;
    std::uint64_t end_;
    const std::uint64_t alignment_;
    bool cancelled_ = false;
};

} // namespace gpustasis
