// SPDX-License-Identifier: Apache-2.0
#include "device_memory/numbered_devices.hpp"

#include "core/error.hpp"

#include <sys/mman.h>

#include <algorithm>
#include <cstring>

namespace gpustasis {

DeviceSizes sizes_of(const std::vector<NumberedDevice>& devices) {
    DeviceSizes sizes;
    for (const NumberedDevice& device : devices)
        if (device.memory.size != 0)
            sizes.emplace_back(device.number, device.memory.size);
    return sizes;
}

std::vector<Region> regions_of(const DeviceSizes& sizes) {
    std::vector<Region> regions;
    for (const auto& [number, size] : sizes)
        for (std::uint64_t offset = 0; offset < whole_pages(size); offset += kStripe)
            regions.push_back({device_address(number, offset),
                               std::min(kStripe, whole_pages(size) - offset),
                               PROT_READ | PROT_WRITE, RegionKind::device});
    std::ranges::sort(regions, {}, &Region::address);
    return regions;
}

std::vector<std::size_t> numbers_of(const ImageInfo& info) {
    std::vector<std::size_t> numbers;
    for (const Region& region : info.regions)
        if (device_offset(region.address) == 0)
            numbers.push_back(device_number(region.address));
    return numbers;
}

std::vector<NumberedDevice> number_devices(const std::vector<GpuInfo>& gpus,
                                           const CustomStorage::Operation& operation,
                                           const std::vector<driver::GpuPair>& pairs) {
    std::vector<NumberedDevice> devices;
    for (const DeviceMemory& memory : operation.devices()) {
        Id from = memory.uuid;
        for (const driver::GpuPair& pair : pairs)
            if (std::memcmp(pair.new_uuid, memory.uuid.data(), sizeof pair.new_uuid) == 0)
                std::memcpy(from.data(), pair.old_uuid, sizeof pair.old_uuid);
        const auto gpu = std::ranges::find(gpus, from, &GpuInfo::uuid);
        if (gpu == gpus.end())
            throw Error(Errc::unsupported, "the driver has handed over memory of a GPU that is not "
                                           "listed in this checkpoint");
        devices.push_back({static_cast<std::size_t>(gpu - gpus.begin()), memory});
    }
    std::ranges::sort(devices, {}, &NumberedDevice::number);
    return devices;
}

std::vector<NumberedDevice> number_devices(const CustomStorage::Operation& operation) {
    std::vector<NumberedDevice> devices;
    for (const DeviceMemory& memory : operation.devices())
        devices.push_back({devices.size(), memory});
    return devices;
}

} // namespace gpustasis
