// SPDX-License-Identifier: Apache-2.0
// Buffers that are used again: as many as threads have at once, and no more memory than is said.
#include "check.hpp"
#include "core/block_output.hpp"
#include "core/direct_io.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
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

// Each begins where the one before it ends, and the first at a huge page: a request of several pages is one piece.
void those_that_are_made_together_lie_side_by_side() {
    constexpr std::size_t kHugePage = std::size_t{2} << 20;
    constexpr std::size_t kSize = 300 << 10; // rounded up to whole pages already
    for (const std::size_t count : {8U, 64U}) {
        std::vector<AlignedBuffer> made = AlignedBuffer::side_by_side(count, kSize);
        CHECK(made.size() == count);
        std::byte* at = made.front().bytes().data();
        CHECK(reinterpret_cast<std::uintptr_t>(at) % kHugePage == 0);
        for (AlignedBuffer& one : made) {
            CHECK(one.bytes().size() == kSize && one.bytes().data() == at);
            std::ranges::fill(one.bytes(), std::byte{0xa5});
            at += kSize;
        }
        std::vector<AlignedBuffer> last; // which keeps the memory of all
        last.push_back(std::move(made.back()));
        made.clear();
        CHECK(std::ranges::count(last.front().bytes(), std::byte{0xa5}) == kSize);
    }
}

void the_pool_makes_several_at_once() {
    BufferPool pool;
    AlignedBuffer first = pool.take(kBlock);
    CHECK(pool.kept() == BufferPool::kMadeAtOnce - kBlock);
    AlignedBuffer next = pool.take(kBlock);
    const auto apart = first.bytes().data() - next.bytes().data();
    CHECK(static_cast<std::size_t>(std::abs(apart)) < BufferPool::kMadeAtOnce);
}

// The kernel is asked for huge pages: it says of the mapping "hg" among its flags.
void they_may_lie_on_huge_pages() {
    std::vector<AlignedBuffer> made = AlignedBuffer::side_by_side(8, kBlock);
    const auto at = reinterpret_cast<std::uintptr_t>(made.front().bytes().data());
    std::ifstream maps("/proc/self/smaps");
    bool is_it = false;
    bool asked = false;
    for (std::string line; std::getline(maps, line);) {
        unsigned long long begin = 0;
        unsigned long long end = 0;
        if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2)
            is_it = begin <= at && at < end;
        else if (is_it && line.starts_with("VmFlags:"))
            asked = line.find(" hg") != std::string::npos;
    }
    CHECK(asked || !std::filesystem::exists("/sys/kernel/mm/transparent_hugepage"));
}

void few_and_small_ones_are_made_alone() {
    CHECK(AlignedBuffer::side_by_side(0, kBlock).empty());
    CHECK(AlignedBuffer::side_by_side(3, 0).back().bytes().empty());
    std::vector<AlignedBuffer> made = AlignedBuffer::side_by_side(2, kDirectAlignment - 1);
    CHECK(made.size() == 2 && made.back().bytes().size() == kDirectAlignment);
    CHECK(is_aligned(made.back().bytes()));
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
    those_that_are_made_together_lie_side_by_side();
    the_pool_makes_several_at_once();
    they_may_lie_on_huge_pages();
    few_and_small_ones_are_made_alone();
    that_of_the_process_goes_with_who_has_it();
}
