// SPDX-License-Identifier: Apache-2.0
// What an address is.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace gpustasis::emulator;

namespace {

struct PointerInfo {
    MemoryType type{};
    const Context* context = nullptr;
    DeviceOrdinal device = 0;
    std::uint64_t start = 0;
    std::uint64_t size = 0;
};

bool find_pointer(Driver& driver, std::uint64_t address, PointerInfo& info) {
    const std::lock_guard lock(driver.mutex);
    if (const Device* device = driver.objects.find_device(address)) {
        const Allocation found = device->vram.find(address);
        info = {MemoryType::device, found.owner, device->ordinal, found.address, found.size};
        return found.size != 0;
    }
    if (const auto mapping = driver.objects.mappings.find(address)) {
        // No context of this process has made it.
        info = {MemoryType::device, nullptr, mapping->device(), mapping->address(),
                mapping->size()};
        return true;
    }
    const auto [start, range] = driver.objects.find_host(address);
    if (range == nullptr) {
        return false;
    }
    info = {MemoryType::host, range->context, range->context->device->ordinal, start, range->size};
    return true;
}

template <typename T>
Result put(void* data, T value) {
    *static_cast<T*>(data) = value;
    return Result::success;
}

Result answer(const PointerInfo& info, std::uint64_t address, PointerAttribute attribute,
              void* data) {
    const bool on_device = info.type == MemoryType::device;
    switch (attribute) {
    case PointerAttribute::context: return put(data, info.context);
    case PointerAttribute::memory_type: return put(data, info.type);
    case PointerAttribute::device_pointer:
        return on_device ? put(data, address) : Result::invalid_value;
    case PointerAttribute::host_pointer:
        return on_device ? Result::invalid_value : put(data, address);
    case PointerAttribute::buffer_id: return put(data, info.start); // unique among what exists
    case PointerAttribute::is_managed: return put(data, false);
    case PointerAttribute::device_ordinal: return put(data, info.device);
    case PointerAttribute::range_start_addr: return put(data, info.start);
    case PointerAttribute::range_size: return put(data, info.size);
    case PointerAttribute::mapped: return put(data, true);
    }
    return Result::not_supported;
}

} // namespace

GPUSTASIS_API(cuPointerGetAttribute)(void* data, PointerAttribute attribute, DevicePtr address) {
    return call([=](Driver& driver) {
        PointerInfo info;
        if (data == nullptr || !find_pointer(driver, address, info)) {
            return Result::invalid_value;
        }
        return answer(info, address, attribute, data);
    });
}

GPUSTASIS_API(cuPointerGetAttributes)
(unsigned count, const PointerAttribute* attributes, void** data, DevicePtr address) {
    return call([=](Driver& driver) {
        if (attributes == nullptr || data == nullptr) {
            return Result::invalid_value;
        }
        PointerInfo info;
        const bool found = find_pointer(driver, address, info);
        for (unsigned i = 0; i < count; ++i) {
            const bool answered =
                found && answer(info, address, attributes[i], data[i]) == Result::success;
            if (!answered && attributes[i] == PointerAttribute::memory_type) {
                put(data[i], MemoryType{}); // no error here: null values instead
            } else if (!answered && attributes[i] == PointerAttribute::device_ordinal) {
                put(data[i], -2);
            } else if (!answered && attributes[i] == PointerAttribute::is_managed) {
                put(data[i], false);
            } else if (!answered) {
                put(data[i], std::uint64_t{0});
            }
        }
        return Result::success;
    });
}
