// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "core/workers.hpp"
#include "core/write_queue.hpp"

#include <atomic>
#include <chrono>
#include <mutex>
#include <set>
#include <thread>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint64_t kChunks = 500;

// `makers` of `threads` make kChunks chunks, every third of which is not to be written.
std::multiset<std::uint64_t> run(unsigned threads, unsigned makers, unsigned buffers) {
    std::mutex mutex;
    std::multiset<std::uint64_t> written;
    WriteQueue queue(buffers, 4096, 0, [&](WriteQueue::Buffer& made) {
        CHECK(made.plain.bytes()[0] == static_cast<std::byte>(made.offset / 2));
        const std::lock_guard lock(mutex);
        written.insert(made.offset / 2);
    });
    std::atomic<unsigned> started = 0;
    std::atomic<std::uint64_t> next = 0;
    FirstFailure failure;
    run_workers(threads, failure, [&] {
        if (started++ < makers) {
            queue.enter();
            WriteQueue::Buffer* buffer = queue.take();
            for (std::uint64_t chunk = next++; chunk < kChunks; chunk = next++) {
                CHECK(buffer != nullptr);
                buffer->offset = chunk * 2;
                buffer->plain.bytes()[0] = static_cast<std::byte>(chunk);
                if (chunk % 3 == 0)
                    continue;
                queue.submit(buffer);
                buffer = queue.take();
            }
            queue.put_back(buffer);
            queue.leave();
        }
        queue.drain();
    });
    return written;
}

void every_chunk_is_written_once_by_any_number_of_threads() {
    std::multiset<std::uint64_t> all;
    for (std::uint64_t chunk = 0; chunk < kChunks; ++chunk)
        if (chunk % 3 != 0)
            all.insert(chunk);
    for (const unsigned makers : {1U, 2U, 5U})
        for (const unsigned writers : {0U, 1U, 7U})
            for (const unsigned spare : {1U, 9U})
                CHECK(run(makers + writers, makers, makers + spare) == all);
}

// A maker is in the middle of a chunk when a writer, and then the other maker, would wait for it.
void nobody_waits_for_a_thread_that_has_failed() {
    WriteQueue queue(3, 4096, 0, [](WriteQueue::Buffer&) { throw Error(Errc::io, "full"); });
    FirstFailure failure;
    std::atomic<unsigned> started = 0;
    CHECK_THROWS(Errc::io, run_workers(4, failure, [&] {
                     try {
                         if (started++ < 2) {
                             queue.enter();
                             while (WriteQueue::Buffer* buffer = queue.take())
                                 queue.submit(buffer);
                             return; // cancelled: it has nothing to leave
                         }
                         queue.drain();
                     } catch (...) {
                         failure.record();
                         queue.cancel();
                     }
                 }));
    CHECK(queue.take() == nullptr);
    queue.drain();
}

// Who drains is not let go while a chunk is being made.
void writers_wait_for_the_last_maker() {
    std::atomic<unsigned> written = 0;
    WriteQueue queue(2, 4096, 0, [&](WriteQueue::Buffer&) { ++written; });
    queue.enter();
    WriteQueue::Buffer* buffer = queue.take();
    std::atomic<bool> drained = false;
    std::jthread writer([&] {
        queue.drain();
        drained = true;
    });
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    CHECK(!drained);
    queue.submit(buffer);
    queue.leave();
    writer.join();
    CHECK(drained && written == 1);
}

} // namespace

int main() {
    every_chunk_is_written_once_by_any_number_of_threads();
    nobody_waits_for_a_thread_that_has_failed();
    writers_wait_for_the_last_maker();
}
