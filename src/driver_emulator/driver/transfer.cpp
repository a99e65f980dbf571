// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/transfer.hpp"

#include "driver_emulator/driver/driver.hpp"

#include <algorithm>
#include <cstring>

namespace gpustasis::emulator {
namespace {

constexpr std::size_t kBounceBytes = 65536;

/// The device that an address is of, null for host memory. False if the range is nobody's.
bool resolve(Driver& driver, std::uint64_t address, std::size_t size, Device** device) noexcept {
    const std::lock_guard lock(driver.mutex);
    *device = driver.objects.find_device(address);
    return *device == nullptr || (*device)->vram.contains(address, size);
}

Result copy_between(Vram& to_vram, std::uint64_t to, const Vram& from_vram, std::uint64_t from,
                    std::size_t size) noexcept {
    unsigned char bounce[kBounceBytes];
    while (size > 0) {
        const std::size_t part = std::min(size, sizeof bounce);
        Result result = from_vram.read(from, bounce, part);
        if (result == Result::success) {
            result = to_vram.write(to, bounce, part);
        }
        if (result != Result::success) {
            return result;
        }
        to += part;
        from += part;
        size -= part;
    }
    return Result::success;
}

} // namespace

Result copy_bytes(Driver& driver, std::uint64_t to, std::uint64_t from, std::size_t size) noexcept {
    if (size == 0) {
        return Result::success;
    }
    Device* to_device = nullptr;
    Device* from_device = nullptr;
    if (!resolve(driver, to, size, &to_device) || !resolve(driver, from, size, &from_device)) {
        return Result::invalid_value;
    }
    auto* to_host = reinterpret_cast<void*>(to);
    const auto* from_host = reinterpret_cast<const void*>(from);
    if (to_device != nullptr && from_device != nullptr) {
        return copy_between(to_device->vram, to, from_device->vram, from, size);
    }
    if (to_device != nullptr) {
        return to_device->vram.write(to, from_host, size);
    }
    if (from_device != nullptr) {
        return from_device->vram.read(from, to_host, size);
    }
    std::memmove(to_host, from_host, size);
    return Result::success;
}

Result is_asynchronous(Driver& driver, std::uint64_t to, std::uint64_t from, std::size_t size,
                       bool& asynchronous) noexcept {
    asynchronous = size != 0;
    for (const std::uint64_t address : {to, from}) {
        Device* device = nullptr;
        if (size != 0 && !resolve(driver, address, size, &device)) {
            return Result::invalid_value;
        }
        const std::lock_guard lock(driver.mutex);
        const bool pinned = driver.objects.find_host(address).second != nullptr;
        asynchronous = asynchronous && (device != nullptr || pinned);
    }
    return Result::success;
}

bool is_fillable(Driver& driver, DevicePtr to, std::size_t pattern_size,
                 std::uint64_t size) noexcept {
    Device* device = nullptr;
    return size == 0 ||
           (resolve(driver, to, size, &device) && device != nullptr && to % pattern_size == 0);
}

Result fill_bytes(Driver& driver, DevicePtr to, const void* pattern, std::size_t pattern_size,
                  std::uint64_t size) noexcept {
    if (size == 0) {
        return Result::success;
    }
    Device* device = nullptr;
    if (!is_fillable(driver, to, pattern_size, size) || !resolve(driver, to, size, &device)) {
        return Result::invalid_value;
    }
    return device->vram.fill(to, pattern, pattern_size, size);
}

} // namespace gpustasis::emulator
