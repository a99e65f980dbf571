// SPDX-License-Identifier: Apache-2.0
// Device memory: allocate, free, ask.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace gpustasis::emulator;

namespace {

constexpr std::size_t kPitchAlignment = 512;

int allocate(DevicePtr* address, std::size_t size) {
    return call_in_context([=](Driver& driver, Context& context) {
        if (address == nullptr) {
            return Result::invalid_value;
        }
        const std::lock_guard lock(driver.mutex);
        return context.device->vram.allocate(driver.link, size, &context, address);
    });
}

} // namespace

GPUSTASIS_API(cuMemAlloc_v2)(DevicePtr* address, std::size_t size) {
    return allocate(address, size);
}

GPUSTASIS_API(cuMemAllocPitch_v2)
(DevicePtr* address, std::size_t* pitch, std::size_t width, std::size_t height,
 unsigned element_size) {
    const bool known = element_size == 4 || element_size == 8 || element_size == 16;
    if (pitch == nullptr || !known || width == 0 || width > (std::size_t{1} << 40) || height == 0 ||
        height > (std::size_t{1} << 20)) {
        return code(Result::invalid_value);
    }
    *pitch = (width + kPitchAlignment - 1) / kPitchAlignment * kPitchAlignment;
    return allocate(address, *pitch * height);
}

GPUSTASIS_API(cuMemFree_v2)(DevicePtr address) {
    return call_in_context([=](Driver& driver, Context&) {
        if (address == 0) {
            return Result::success;
        }
        const Result done = synchronise(driver); // as the real one: it may still be in use
        if (done != Result::success) {
            return done;
        }
        const std::lock_guard lock(driver.mutex);
        Device* device = driver.objects.find_device(address);
        return device == nullptr ? Result::invalid_value : device->vram.free(driver.link, address);
    });
}

GPUSTASIS_API(cuMemGetInfo_v2)(std::size_t* free, std::size_t* total) {
    return call_in_context([=](Driver& driver, Context& context) {
        std::uint64_t free_bytes = 0;
        std::uint64_t total_bytes = 0;
        const Result result =
            driver.link.memory_info(context.device->gpu, &free_bytes, &total_bytes);
        if (free != nullptr) {
            *free = free_bytes;
        }
        if (total != nullptr) {
            *total = total_bytes;
        }
        return result;
    });
}

GPUSTASIS_API(cuMemGetAddressRange_v2)(DevicePtr* base, std::size_t* size, DevicePtr address) {
    return call_in_context([=](Driver& driver, Context&) {
        const std::lock_guard lock(driver.mutex);
        const Device* device = driver.objects.find_device(address);
        Allocation found = device == nullptr ? Allocation{} : device->vram.find(address);
        if (const auto mapping = driver.objects.mappings.find(address)) {
            found = {mapping->address(), mapping->size(), nullptr};
        }
        if (found.size == 0) {
            return Result::not_found;
        }
        if (base != nullptr) {
            *base = found.address;
        }
        if (size != nullptr) {
            *size = found.size;
        }
        return Result::success;
    });
}
