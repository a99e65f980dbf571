// SPDX-License-Identifier: Apache-2.0
#include "core/write_queue.hpp"

#include <utility>

namespace gpustasis {

WriteQueue::WriteQueue(unsigned buffers, std::size_t plain_size, std::size_t packed_size,
                       Write write)
    : write_(std::move(write)) {
    free_.reserve(buffers);
    std::vector<AlignedBuffer> plain = AlignedBuffer::side_by_side(buffers, plain_size);
    std::vector<AlignedBuffer> packed = AlignedBuffer::side_by_side(buffers, packed_size);
    for (unsigned i = 0; i < buffers; ++i) {
        buffers_.push_back(
            {.plain = std::move(plain[i]), .packed = std::move(packed[i]), .lent = {}});
        free_.push_back(&buffers_.back());
    }
}

void WriteQueue::enter() {
    const std::lock_guard lock(mutex_);
    ++makers_;
}

void WriteQueue::leave() {
    {
        const std::lock_guard lock(mutex_);
        --makers_;
        all_made_ = true;
    }
    submitted_.notify_all();
}

WriteQueue::Buffer* WriteQueue::take() {
    std::unique_lock lock(mutex_);
    while (!cancelled_) {
        if (!free_.empty()) {
            Buffer* buffer = free_.back();
            free_.pop_back();
            return buffer;
        }
        if (!write_next(lock))
            freed_.wait(lock);
    }
    return nullptr;
}

void WriteQueue::submit(Buffer* buffer) {
    {
        const std::lock_guard lock(mutex_);
        queue_.push_back(buffer);
    }
    submitted_.notify_one();
}

void WriteQueue::put_back(Buffer* buffer) {
    {
        const std::lock_guard lock(mutex_);
        free_.push_back(buffer);
    }
    freed_.notify_one();
}

void WriteQueue::drain() {
    std::unique_lock lock(mutex_);
    while (!cancelled_) {
        if (write_next(lock))
            continue;
        if (all_made_ && makers_ == 0)
            return;
        submitted_.wait(lock);
    }
}

void WriteQueue::cancel() noexcept {
    {
        const std::lock_guard lock(mutex_);
        cancelled_ = true;
    }
    submitted_.notify_all();
    freed_.notify_all();
}

// False: nothing is queued. The lock is given back while it writes.
bool WriteQueue::write_next(std::unique_lock<std::mutex>& lock) {
    if (queue_.empty())
        return false;
    Buffer* buffer = queue_.front();
    queue_.pop_front();
    lock.unlock();
    write_(*buffer);
    lock.lock();
    free_.push_back(buffer);
    freed_.notify_one();
    return true;
}

} // namespace gpustasis
