// SPDX-License-Identifier: Apache-2.0
// Buffers that are used again: as many as threads have at once, and no more memory than is said.
#include "check.hpp"
#include "core/block_output.hpp"
#include "core/direct_io.hpp"

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::size_t kBlock = BlockOutput::kBlockSize;

std::vector<AlignedBuffer> take(BufferPool& pool, std::size_t count) {
    std::vector<AlignedBuffer> taken;
    while (taken.size() < count)
        taken.push_back(pool.take(kBlock));
    return taken;
}

void put_back(BufferPool& pool, std::vector<AlignedBuffer> taken) {
    for (AlignedBuffer& buffer : taken)
        pool.put_back(std::move(buffer));
}

// On a machine with eight processors or more; a fixed number of eight buffers was too few for two.
void blocks_of_all_threads_that_wait_for_a_device_are_kept() {
    constexpr std::size_t kMostThreads = 64; // workers.cpp
    BufferPool pool;
    put_back(pool, take(pool, kMostThreads));
    CHECK(pool.kept() == kMostThreads * kBlock);
    const std::vector<AlignedBuffer> again = take(pool, kMostThreads);
    CHECK(pool.kept() == 0); // none of them is new
}

void memory_is_bounded() {
    BufferPool pool;
    CHECK(pool.kept() == 0);
    put_back(pool, take(pool, 3 * BufferPool::kMostKept / kBlock));
    CHECK(pool.kept() == BufferPool::kMostKept);
    pool.put_back(AlignedBuffer(kDirectAlignment));
    CHECK(pool.kept() == BufferPool::kMostKept);
    pool.put_back(pool.take(kBlock));
    CHECK(pool.kept() == BufferPool::kMostKept);
    BufferPool another;
    another.put_back(AlignedBuffer(BufferPool::kMostKept + 1));
    CHECK(another.kept() == 0);
}

void one_that_is_too_small_is_not_given() {
    BufferPool pool;
    pool.put_back(AlignedBuffer(kDirectAlignment));
    CHECK(pool.kept() == kDirectAlignment);
    CHECK(pool.take(kDirectAlignment + 1).bytes().size() == 2 * kDirectAlignment);
    CHECK(pool.kept() == 0);
}

void that_of_the_process_goes_with_who_has_it() {
    std::shared_ptr<BufferPool> mine = BufferPool::of_process();
    std::shared_ptr<BufferPool> others = BufferPool::of_process();
    CHECK(mine == others);
    mine->put_back(AlignedBuffer(kBlock));
    mine.reset();
    CHECK(BufferPool::of_process()->kept() == kBlock);
    others.reset();
    CHECK(BufferPool::of_process()->kept() == 0);
}

} // namespace

int main() {
    blocks_of_all_threads_that_wait_for_a_device_are_kept();
    memory_is_bounded();
    one_that_is_too_small_is_not_given();
    that_of_the_process_goes_with_who_has_it();
}
