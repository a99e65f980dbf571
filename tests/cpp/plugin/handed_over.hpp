// SPDX-License-Identifier: Apache-2.0
/// GPU memory that the driver of storage_driver.hpp has handed over, for tests of what copies it.
#pragma once

#include "check.hpp"
#include "sample.hpp"
#include "storage_driver.hpp"

#include "device_memory/custom_storage.hpp"
#include "device_memory/device_copy.hpp"
#include "device_memory/numbered_devices.hpp"

#include <dlfcn.h>

#include <atomic>
#include <cstddef>
#include <vector>

namespace handed_over {

using namespace gpustasis;
using storage_driver::state;
using storage_driver::uuid;

inline constexpr int kPid = 7;
inline constexpr std::size_t kBlock = std::size_t{4} << 20;
inline constexpr std::size_t kBlocks = CopyLane::kSize / kBlock;
inline constexpr std::size_t kPiece = std::size_t{256} << 10;
inline constexpr std::size_t kPieces = CopyLane::kSize / kPiece;

inline CustomStorage new_storage() {
    return CustomStorage(::dlopen(nullptr, RTLD_NOW), "the test");
}

/// GPU memory that was handed over.
struct HandedOver {
    explicit HandedOver(std::size_t size) {
        storage_driver::have(kPid, {sample::random_bytes(size, 1), {}});
        storage.prepare({uuid(0)}, 1);
        storage.reserve({uuid(0)}, operation);
        storage.checkpoint(kPid, operation, held);
        devices = number_devices(operation);
    }
    ~HandedOver() {
        operation.complete();
        CHECK(state.races == 0);
    }
    HandedOver(const HandedOver&) = delete;
    HandedOver& operator=(const HandedOver&) = delete;

    const sample::Buffer& memory() const { return state.memory[kPid][0]; }
    const DeviceMemory& device() const { return devices.front().memory; }

    CustomStorage storage = new_storage();
    CustomStorage::Operation operation;
    std::atomic<bool> held = false;
    std::vector<NumberedDevice> devices;
    MovedAt moved_at = 0;
};

} // namespace handed_over
