// SPDX-License-Identifier: Apache-2.0
/// Chunks on their way to storage, between the threads that make them and those that write them.
#pragma once

#include "core/direct_io.hpp"
#include "core/memory_port.hpp"

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <mutex>
#include <vector>

namespace gpustasis {

/// A bounded number of buffers that go round: makers fill them, writers empty them. A processor is
/// busy while the device is, and no more threads than processors ask for the job's memory, for which
/// they would only wait for each other.
///
/// Threads may be makers first and writers then; a maker that finds no free buffer writes until
/// there is one. So all goes on with any number of writers, none among them.
class WriteQueue {
public:
    struct Buffer {
        AlignedBuffer plain;
        AlignedBuffer packed;
        Lent<MemorySource> lent; ///< if it holds a chunk, `plain` does not
        std::uint64_t offset = 0;
        std::size_t size = 0;   ///< bytes to be written
        bool is_packed = false; ///< they are in `packed`

        MutBytes plain_bytes() noexcept {
            return lent.bytes().empty() ? plain.bytes() : lent.bytes();
        }
    };
    using Write = std::function<void(Buffer&)>;

    /// `buffers`: more than there will be makers. `write`: puts one where it belongs; called by
    /// several threads at once. Throws std::bad_alloc.
    WriteQueue(unsigned buffers, std::size_t plain_size, std::size_t packed_size, Write write);

    /// This thread makes chunks, until it leaves.
    void enter();
    /// A maker leaves: none are left to be made. Called by every maker.
    void leave();

    /// A buffer that nobody else has; nullptr: cancelled. Throws what `write` throws.
    Buffer* take();
    /// `buffer` is full, and the queue's again.
    void submit(Buffer* buffer);
    /// `buffer` is not needed, and the queue's again.
    void put_back(Buffer* buffer);

    /// Write what is submitted, until all is written and all makers have left, or cancel(). Throws
    /// what `write` throws.
    void drain();

    /// All other threads are to return: one has failed.
    void cancel() noexcept;

private:
    bool write_next(std::unique_lock<std::mutex>& lock);

    const Write write_;
    std::mutex mutex_;
    std::condition_variable submitted_; ///< or nothing more will be
    std::condition_variable freed_;     ///< or cancelled
    std::deque<Buffer> buffers_;
    std::vector<Buffer*> free_; ///< the last one first: it is in a cache
    std::deque<Buffer*> queue_;
    unsigned makers_ = 0;
    bool all_made_ = false;
    bool cancelled_ = false;
};

} // namespace gpustasis
