// SPDX-License-Identifier: Apache-2.0
// What a GPU, its driver or an image does wrong while memory is copied: nothing is read or written that is not that memory.
#include "handed_over.hpp"

#include "device_memory/driver_error.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <span>

using namespace handed_over;

namespace {

// Its region is of whole pages, and the image does not say how long it was.
void bytes_of_an_image_for_which_a_gpu_has_no_room_are_refused() {
    constexpr std::size_t kPage = 4096, kSize = kPage + 100;
    HandedOver of(kSize);
    DeviceSink sink(of.storage, of.devices, of.moved_at);
    std::vector<std::byte> page(kPage, std::byte{1});
    CHECK_THROWS(Errc::corrupt_data, sink.write(device_address(0, kPage), page));
    std::ranges::fill(std::span(page).subspan(kSize - kPage), std::byte{0});
    sink.write(device_address(0, kPage), page);
    page[kSize - kPage] = std::byte{1};
    CHECK_THROWS(Errc::corrupt_data, sink.write(device_address(0, kPage), page));
    sink.finish();
    CHECK(of.memory()[kPage - 1] == std::byte{0});
    CHECK(of.memory()[kPage] == std::byte{1} && of.memory()[kSize - 1] == std::byte{1});
}

// Whatever cannot be done with it: the memory is here, and has to be copied.
void memory_whose_stream_is_not_known_is_waited_for_all_the_same() {
    constexpr std::size_t kSize = 1 << 20;
    state.knows_own_streams = false;
    {
        HandedOver of(kSize);
        DeviceSource source(of.storage, of.devices, of.moved_at);
        std::vector<std::byte> read(kSize);
        source.read(device_address(of.devices.front().number, 0), read);
        CHECK(std::ranges::equal(read, sample::random_bytes(kSize, 1)));
        of.storage.prepare({uuid(0), uuid(1)}, 1);
        state.broken_gpu = 1; // which this memory is not on
        DeviceSource again(of.storage, of.devices, of.moved_at);
        std::ranges::fill(read, std::byte{});
        again.read(device_address(of.devices.front().number, 0), read);
        CHECK(std::ranges::equal(read, sample::random_bytes(kSize, 1)));
        state.broken_gpu = 0;
        CHECK_THROWS(Errc::io, DeviceSource(of.storage, of.devices, of.moved_at));
        state.broken_gpu = -1;
    }
    state.knows_own_streams = true;
    HandedOver of(kSize);
    state.synchronizes = false; // nothing can be waited for: nothing is read
    CHECK_THROWS(Errc::io, DeviceSource(of.storage, of.devices, of.moved_at));
    state.synchronizes = true;
}

// The first context is not that of the GPU which it is on.
void memory_of_another_gpu_whose_stream_is_not_known_is_waited_for_too() {
    constexpr std::size_t kSize = 1 << 20;
    const sample::Buffer content = sample::random_bytes(kSize, 2);
    CustomStorage storage = new_storage();
    storage.prepare({uuid(0), uuid(1)}, 2);
    storage_driver::have(kPid, {sample::Buffer{}, content});
    CustomStorage::Operation operation;
    storage.reserve({uuid(0)}, operation);
    std::atomic<bool> held = false;
    state.knows_own_streams = false;
    storage.checkpoint(kPid, operation, held);
    const auto devices = number_devices(operation);
    MovedAt moved_at = 0;
    {
        DeviceSource source(storage, devices, moved_at);
        std::vector<std::byte> read(kSize);
        source.read(device_address(devices.front().number, 0), read);
        CHECK(read == content);
    }
    operation.complete();
    state.knows_own_streams = true;
}

// An image of what a GPU has no page for could not be restored.
void what_a_page_has_more_than_its_gpu_is_read_as_zero() {
    constexpr std::size_t kPage = 4096, kMore = 100;
    HandedOver of(kPage + kMore);
    DeviceSource source(of.storage, of.devices, of.moved_at);
    std::vector<std::byte> read(2 * kPage, std::byte{0xff});
    source.read(device_address(0, 0), read);
    CHECK(std::memcmp(read.data(), of.memory().data(), kPage + kMore) == 0);
    CHECK(std::ranges::all_of(std::span(read).subspan(kPage + kMore),
                              [](std::byte byte) { return byte == std::byte{0}; }));
}

// As of an error that the GPU or its link meets while it copies: only whoever waits is told.
void what_was_not_copied_is_not_read() {
    HandedOver of(kBlocks * kBlock);
    state.waits_left = 0;
    {
        DeviceSource source(of.storage, of.devices, of.moved_at);
        std::vector<std::byte> read(kBlock);
        CHECK_THROWS(Errc::io, source.read(device_address(0, 0), read));
        CHECK_THROWS(Errc::io, source.lend(device_address(0, kBlock), kPiece));
    }
    CHECK_THROWS(Errc::io, DeviceSink(of.storage, of.devices, of.moved_at)); // nothing is zero
    state.waits_left = 1'000'000;
    DeviceSink sink(of.storage, of.devices, of.moved_at);
    sink.write(device_address(0, 0), std::vector<std::byte>(kPiece, std::byte{1}));
    state.waits_left = 0;
    CHECK_THROWS(Errc::io, sink.finish());
    state.waits_left = 1'000'000;
}

// One that the task has nothing on may be full: it is the driver who says whether it wants a context there.
void a_restore_needs_no_context_on_a_gpu_that_the_driver_does_not_ask_for() {
    state.full_gpu = 0;
    ImageInfo info;
    info.gpus = {{.uuid = uuid(0), .name = {}, .memory_size = 0},
                 {.uuid = uuid(1), .name = {}, .memory_size = 0}};
    info.of_devices = true;
    info.regions = regions_of({{1, kBlock}});
    for (const int refusals : {1, 2}) {
        CustomStorage storage = new_storage();
        storage_driver::have(kPid, {sample::Buffer{}, sample::random_bytes(kBlock, 1)});
        CustomStorage::Operation operation;
        state.restores = state.contexts = 0;
        state.contexts_missing = refusals;
        std::optional<DriverError> failed;
        try {
            begin_restore(storage, kPid, info, {}, operation);
            operation.complete();
        } catch (const DriverError& e) {
            failed = e;
        }
        CHECK(state.restores == 2);
        CHECK(state.contexts == 1);
        CHECK(failed.has_value() == (refusals == 2));
        // Why there is no context, and not that there is none.
        CHECK(!failed || failed->result() == storage_driver::kRefused);
    }
    state.contexts_missing = 0;
    state.full_gpu = -1;
}

} // namespace

int main() {
    a_restore_needs_no_context_on_a_gpu_that_the_driver_does_not_ask_for();
    bytes_of_an_image_for_which_a_gpu_has_no_room_are_refused();
    memory_whose_stream_is_not_known_is_waited_for_all_the_same();
    memory_of_another_gpu_whose_stream_is_not_known_is_waited_for_too();
    what_a_page_has_more_than_its_gpu_is_read_as_zero();
    what_was_not_copied_is_not_read();
}
