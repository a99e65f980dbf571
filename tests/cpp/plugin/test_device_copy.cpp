// SPDX-License-Identifier: Apache-2.0
// Page-locked memory and streams of custom storage, and the rings of them that copies go through.
#include "handed_over.hpp"

#include "core/workers.hpp"

#include <cstdlib>
#include <new>
#include <thread>
#include <utility>
#include <vector>

using namespace handed_over;

namespace {

thread_local int allocations_left = -1; // -1: as many as there is memory for

void* allocate(std::size_t size) noexcept {
    if (allocations_left == 0)
        return nullptr;
    if (allocations_left > 0)
        --allocations_left;
    return std::malloc(size == 0 ? 1 : size);
}

} // namespace

// Not inlined: GCC takes free() of what `new` has returned for a mistake.
[[gnu::noinline]] void* operator new(std::size_t size) {
    if (void* memory = allocate(size))
        return memory;
    throw std::bad_alloc();
}
[[gnu::noinline]] void* operator new(std::size_t size, const std::nothrow_t&) noexcept {
    return allocate(size);
}
[[gnu::noinline]] void operator delete(void* memory) noexcept {
    std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept {
    std::free(memory);
}

namespace {

void expect_nothing_left() {
    CHECK(state.contexts == 0);
    CHECK(state.streams == 0);
    CHECK(state.hosts == 0);
}

void what_cannot_be_prepared_leaves_nothing_behind() {
    for (int streams = 0; streams < static_cast<int>(CopyLane::kStreams); ++streams) {
        CustomStorage storage = new_storage();
        state.streams_left = streams;
        CHECK_THROWS(Errc::io, storage.prepare({uuid(0)}, 1));
        expect_nothing_left();
    }
    state.streams_left = 1000;
    bool is_done = false;
    for (int allocations = 0; !is_done; ++allocations) {
        CustomStorage storage = new_storage();
        const std::vector<Id> gpus{uuid(0)};
        allocations_left = allocations;
        try {
            storage.prepare(gpus, 1);
            is_done = true;
        } catch (const std::bad_alloc&) {
        }
        allocations_left = -1;
        if (!is_done)
            expect_nothing_left();
        CHECK(allocations < 1000);
    }
    CHECK(state.contexts.exchange(0) == 1); // for the rest of the process
    CHECK(state.streams == 0 && state.hosts == 0);
}

void operations_on_one_gpu_have_page_locked_memory_each() {
    storage_driver::have(kPid, {sample::random_bytes(4096, 1), {}});
    storage_driver::have(kPid + 1, {sample::random_bytes(4096, 2), {}});
    CustomStorage storage = new_storage();
    storage.prepare({uuid(0), uuid(1)}, 1);
    CHECK(storage.have_lanes({uuid(0)}));
    CHECK(!storage.have_lanes({uuid(0), uuid(1)}));
    for (int round = 0; round < 2; ++round) { // what was made is used again
        CustomStorage::Operation operations[2];
        std::atomic<bool> held = false;
        for (CustomStorage::Operation& operation : operations)
            storage.reserve({uuid(0)}, operation);
        CHECK(state.hosts == 2);
        storage.checkpoint(kPid, operations[0], held);
        storage.checkpoint(kPid + 1, operations[1], held);
        {
            const CustomStorage::Lane one(storage, operations[0].devices().front());
            const CustomStorage::Lane other(storage, operations[1].devices().front());
            CHECK(one.memory() != other.memory());
        }
        for (CustomStorage::Operation& operation : operations)
            operation.complete();
    }
    CHECK(state.hosts == 2 && state.late == 0);
}

void a_lane_that_may_be_in_use_is_not_given_to_others() {
    HandedOver of(4096);
    std::optional<CustomStorage::Lane> lane(std::in_place, of.storage, of.device());
    const std::byte* const first = lane->memory();
    std::thread([&] { lane.reset(); }).join(); // one without a context of its own
    lane.emplace(of.storage, of.device());
    CHECK(lane->memory() == first);
    state.synchronizes = false;
    lane.reset();
    state.synchronizes = true;
    const int hosts = state.hosts;
    lane.emplace(of.storage, of.device());
    CHECK(lane->memory() != first);
    CHECK(state.hosts == hosts + 1); // nor was it freed
}

void half_of_a_source_is_lent_and_the_rest_is_copied() {
    HandedOver of(kBlocks * kBlock);
    DeviceSource source(of.storage, of.devices, of.moved_at);
    std::vector<std::pair<std::uint64_t, MutBytes>> lent;
    for (std::size_t block = 0; block < kBlocks; ++block) {
        const std::uint64_t address = device_address(0, block * kBlock);
        const MutBytes bytes = source.lend(address, kPiece);
        CHECK(bytes.empty() == (block >= kBlocks / 2));
        if (!bytes.empty())
            lent.emplace_back(address, bytes);
        else
            CHECK(!source.lend(lent.back().first + kPiece, 1).empty()); // it waits already
        if (bytes.empty())
            source.take_back(lent.back().first + kPiece, lent.back().second.first(1));
    }
    sample::Buffer copy(kPiece);
    source.read(device_address(0, (kBlocks - 1) * kBlock), copy);
    CHECK(std::memcmp(copy.data(), of.memory().data() + (kBlocks - 1) * kBlock, kPiece) == 0);
    for (const auto& [address, bytes] : lent) {
        CHECK(std::memcmp(bytes.data(), of.memory().data() + device_offset(address), kPiece) == 0);
        source.take_back(address, bytes);
    }
    const std::uint64_t address = device_address(0, (kBlocks - 2) * kBlock);
    const MutBytes again = source.lend(address, kPiece);
    CHECK(!again.empty());
    source.take_back(address, again);
}

void half_of_a_sink_is_lent_and_the_rest_is_copied() {
    HandedOver of(kPieces * kPiece);
    DeviceSink sink(of.storage, of.devices, of.moved_at);
    const auto address = [](std::size_t piece) { return device_address(0, piece * kPiece); };
    std::vector<MutBytes> lent;
    for (std::size_t piece = 0; piece < kPieces; ++piece) {
        const MutBytes bytes = sink.lend(address(piece), kPiece);
        CHECK(bytes.empty() == (piece >= kPieces / 2));
        if (!bytes.empty())
            lent.push_back(bytes);
    }
    const sample::Buffer written = sample::random_bytes(kPieces / 2 * kPiece, 3);
    sink.write(address(kPieces / 2), written);
    for (std::size_t piece = 0; piece < lent.size(); ++piece) {
        std::ranges::fill(lent[piece], std::byte{5});
        if (piece % 2 == 0)
            sink.put(address(piece), lent[piece]);
        else
            sink.take_back(address(piece), lent[piece]);
    }
    CHECK(!sink.lend(address(0), kPiece).empty());
    sink.finish();
    CHECK(std::memcmp(of.memory().data() + CopyLane::kSize / 2, written.data(), written.size()) ==
          0);
    for (std::size_t piece = 0; piece < lent.size(); ++piece)
        CHECK(of.memory()[piece * kPiece] == std::byte(piece % 2 == 0 ? 5 : 0));
}

// An undo has no memory to lose.
void what_a_sink_takes_back_needs_no_memory() {
    HandedOver of(kPieces * kPiece);
    DeviceSink sink(of.storage, of.devices, of.moved_at);
    allocations_left = 0;
    for (std::size_t i = 0; i < 4 * kPieces; ++i) {
        const std::uint64_t address = device_address(0, i % kPieces * kPiece);
        const MutBytes bytes = sink.lend(address, kPiece);
        CHECK(bytes.size() == kPiece);
        if (i % 2 == 0)
            sink.put(address, bytes);
        else
            sink.take_back(address, bytes);
    }
    allocations_left = -1;
}

// Each wait is for all that was begun on the stream, at the speed of one GPU, and others have to be filled meanwhile.
void a_stream_is_waited_for_once_for_all_that_was_copied_before() {
    constexpr std::size_t kLaps = 4;
    HandedOver of(kLaps * CopyLane::kSize);
    {
        DeviceSink sink(of.storage, of.devices, of.moved_at);
        const int before = state.waits;
        for (std::size_t piece = 0; piece < kLaps * kPieces; ++piece)
            sink.write(device_address(0, piece * kPiece),
                       std::vector<std::byte>(kPiece, std::byte(piece % 251)));
        CHECK(state.waits - before == static_cast<int>((kLaps - 1) * CopyLane::kStreams));
        sink.finish();
    }
    for (std::size_t piece = 0; piece < kLaps * kPieces; ++piece)
        CHECK(of.memory()[piece * kPiece] == std::byte(piece % 251));
}

// Of a driver that copies as late as it may.
void no_piece_is_written_to_before_it_was_copied() {
    constexpr std::size_t kLaps = 3;
    HandedOver of(kLaps * CopyLane::kSize);
    {
        DeviceSink sink(of.storage, of.devices, of.moved_at);
        std::atomic<std::size_t> next = 0;
        FirstFailure failure;
        run_workers(4, failure, [&] {
            for (std::size_t piece = next++; piece < kLaps * kPieces; piece = next++)
                sink.write(device_address(0, piece * kPiece),
                           std::vector<std::byte>(kPiece, std::byte(piece % 251)));
        });
        sink.finish();
    }
    for (std::size_t piece = 0; piece < kLaps * kPieces; ++piece) {
        const auto wanted = std::byte(piece % 251);
        CHECK(of.memory()[piece * kPiece] == wanted &&
              of.memory()[(piece + 1) * kPiece - 1] == wanted);
    }
}

void restores_on_one_gpu_have_page_locked_memory_each_before_the_driver_is_asked() {
    CustomStorage storage = new_storage();
    const int hosts = state.hosts;
    ImageInfo info;
    info.gpus = {{.uuid = uuid(0), .name = {}, .memory_size = 0}};
    info.of_devices = true;
    info.regions = regions_of({{0, kBlock}});
    storage.prepare({uuid(0)}, 1); // as for one of them
    CustomStorage::Operation operations[2];
    for (int i = 0; i < 2; ++i) {
        storage_driver::have(kPid + i, {sample::random_bytes(kBlock, 1), {}});
        state.in_flight = state.late = 0; // the first one's is no concern of the second
        begin_restore(storage, kPid + i, info, {}, operations[i]);
    }
    state.in_flight = 2;
    {
        const CustomStorage::Lane one(storage, operations[0].devices().front());
        const CustomStorage::Lane other(storage, operations[1].devices().front());
        CHECK(state.late == 0 && state.hosts == hosts + 2);
    }
    for (CustomStorage::Operation& operation : operations)
        operation.complete();
}

// Whoever makes a lane for one GPU holds up nobody who copies from another.
void a_lane_that_takes_long_is_not_waited_for() {
    CustomStorage storage = new_storage();
    storage.prepare({uuid(0)}, 1);
    storage_driver::have(kPid, {sample::random_bytes(kBlock, 1), {}});
    CustomStorage::Operation operation;
    storage.reserve({uuid(0)}, operation);
    std::atomic<bool> held = false;
    storage.checkpoint(kPid, operation, held);
    state.context_waits = false;
    state.context_gate.lock();
    std::thread slow([&] { storage.prepare({uuid(1)}, 1); });
    while (!state.context_waits)
        std::this_thread::yield();
    { const CustomStorage::Lane lane(storage, operation.devices().front()); }
    operation.complete();
    state.context_gate.unlock();
    slow.join();
}

} // namespace

int main() {
    what_cannot_be_prepared_leaves_nothing_behind();
    operations_on_one_gpu_have_page_locked_memory_each();
    a_lane_that_may_be_in_use_is_not_given_to_others();
    half_of_a_source_is_lent_and_the_rest_is_copied();
    half_of_a_sink_is_lent_and_the_rest_is_copied();
    what_a_sink_takes_back_needs_no_memory();
    a_stream_is_waited_for_once_for_all_that_was_copied_before();
    no_piece_is_written_to_before_it_was_copied();
    restores_on_one_gpu_have_page_locked_memory_each_before_the_driver_is_asked();
    a_lane_that_takes_long_is_not_waited_for();
}
