// SPDX-License-Identifier: Apache-2.0
/// Which GPU of an image each piece of memory of an operation is, and where in the image it lies.
#pragma once

#include "core/image_info.hpp"
#include "device_memory/custom_storage.hpp"

#include <cstddef>
#include <cstdint>
#include <utility>
#include <vector>

namespace gpustasis {

/// Memory of one GPU and its number among the GPUs of the image.
struct NumberedDevice {
    std::size_t number = 0;
    DeviceMemory memory;
};

/// Of the regions that hold `size` bytes of a GPU: whole pages, what is more is zero.
constexpr std::uint64_t whole_pages(std::uint64_t size) noexcept {
    return (size + 4095) / 4096 * 4096;
}

/// Of what is on each of some GPUs: number among the GPUs of the image, and bytes.
using DeviceSizes = std::vector<std::pair<std::size_t, std::uint64_t>>;
DeviceSizes sizes_of(const std::vector<NumberedDevice>& devices);
/// As an image has them.
std::vector<Region> regions_of(const DeviceSizes& sizes);

/// The GPUs of `info` that its regions are of, each once.
std::vector<std::size_t> numbers_of(const ImageInfo& info);

/// The devices of `operation` by their places among `gpus`, from where `pairs` have moved them. Throws Error: unsupported
/// for one that is not listed.
std::vector<NumberedDevice> number_devices(const std::vector<GpuInfo>& gpus,
                                           const CustomStorage::Operation& operation,
                                           const std::vector<driver::GpuPair>& pairs = {});
/// By their places in the operation's list: where nobody else is to understand it.
std::vector<NumberedDevice> number_devices(const CustomStorage::Operation& operation);

} // namespace gpustasis
