// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/transfer.hpp"

#include "driver_emulator/driver/driver.hpp"

#include <algorithm>
#include <cstring>

namespace gpustasis::emulator {
namespace {

constexpr std::size_t kBounceBytes = 65536;

/// Where an address leads; host memory if both are null.
struct Place {
    Device* device = nullptr;
    std::shared_ptr<const StorageMapping> mapping;

    [[nodiscard]] bool is_host() const noexcept { return device == nullptr && mapping == nullptr; }
};

/// False if the range is nobody's.
bool resolve(Driver& driver, std::uint64_t address, std::size_t size, Place& place) noexcept {
    const std::lock_guard lock(driver.mutex);
    place.device = driver.objects.find_device(address);
    if (place.device != nullptr) {
        return place.device->vram.contains(address, size);
    }
    place.mapping = driver.objects.mappings.find(address);
    return place.mapping != nullptr ? place.mapping->contains(address, size)
                                    : !driver.objects.mappings.is_dead(address);
}

Result read(const Place& from, std::uint64_t address, void* to, std::size_t size) noexcept {
    return from.device != nullptr ? from.device->vram.read(address, to, size)
                                  : from.mapping->read(address, to, size);
}

Result write(const Place& to, std::uint64_t address, const void* from, std::size_t size) noexcept {
    return to.device != nullptr ? to.device->vram.write(address, from, size)
                                : to.mapping->write(address, from, size);
}

Result copy_between(const Place& to_place, std::uint64_t to, const Place& from_place,
                    std::uint64_t from, std::size_t size) noexcept {
    unsigned char bounce[kBounceBytes];
    while (size > 0) {
        const std::size_t part = std::min(size, sizeof bounce);
        Result result = read(from_place, from, bounce, part);
        if (result == Result::success) {
            result = write(to_place, to, bounce, part);
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
    Place to_place;
    Place from_place;
    if (!resolve(driver, to, size, to_place) || !resolve(driver, from, size, from_place)) {
        return Result::invalid_value;
    }
    auto* to_host = reinterpret_cast<void*>(to);
    const auto* from_host = reinterpret_cast<const void*>(from);
    if (!to_place.is_host() && !from_place.is_host()) {
        return copy_between(to_place, to, from_place, from, size);
    }
    if (to_place.mapping != nullptr) {
        return to_place.mapping->write_from_host(to, from_host, size);
    }
    if (from_place.mapping != nullptr) {
        return from_place.mapping->read_to_host(from, to_host, size);
    }
    if (to_place.device != nullptr) {
        return to_place.device->vram.write(to, from_host, size);
    }
    if (from_place.device != nullptr) {
        return from_place.device->vram.read(from, to_host, size);
    }
    std::memmove(to_host, from_host, size);
    return Result::success;
}

Result find_turn(Driver& driver, std::uint64_t to, std::uint64_t from, std::size_t size,
                 CopyTurn& turn) noexcept {
    turn = size == 0 ? CopyTurn::at_once : CopyTurn::ordered;
    for (const std::uint64_t address : {to, from}) {
        Place place;
        if (size != 0 && !resolve(driver, address, size, place)) {
            return Result::invalid_value;
        }
        const std::lock_guard lock(driver.mutex);
        const bool pageable =
            place.is_host() && driver.objects.find_host(address).second == nullptr;
        if (pageable) {
            turn = CopyTurn::at_once;
        } else if (place.mapping != nullptr && turn != CopyTurn::at_once) {
            turn = CopyTurn::direct;
        }
    }
    return Result::success;
}

CopyTurn find_fill_turn(Driver& driver, DevicePtr to) noexcept {
    const std::lock_guard lock(driver.mutex);
    return driver.objects.mappings.find(to) != nullptr ? CopyTurn::direct : CopyTurn::ordered;
}

bool is_fillable(Driver& driver, DevicePtr to, std::size_t pattern_size,
                 std::uint64_t size) noexcept {
    Place place;
    return size == 0 ||
           (resolve(driver, to, size, place) && !place.is_host() && to % pattern_size == 0);
}

Result fill_bytes(Driver& driver, DevicePtr to, const void* pattern, std::size_t pattern_size,
                  std::uint64_t size) noexcept {
    if (size == 0) {
        return Result::success;
    }
    Place place;
    if (!is_fillable(driver, to, pattern_size, size) || !resolve(driver, to, size, place)) {
        return Result::invalid_value;
    }
    return place.device != nullptr ? place.device->vram.fill(to, pattern, pattern_size, size)
                                   : place.mapping->fill(to, pattern, pattern_size, size);
}

} // namespace gpustasis::emulator
