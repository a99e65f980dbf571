// SPDX-License-Identifier: Apache-2.0
/// Memory of an operation of custom storage as an image's source and sink. Its addresses are those of regions of
/// RegionKind::device.
#pragma once

#include "core/image_reader.hpp"
#include "core/memory_port.hpp"
#include "device_memory/custom_storage.hpp"
#include "device_memory/numbered_devices.hpp"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace gpustasis {

/// When something was last copied, for whoever watches: ticks of the steady clock, which all processes share.
using MovedAt = std::atomic<std::chrono::steady_clock::rep>;
/// That is now.
void touch(MovedAt& moved_at) noexcept;

/// Reads ahead: each GPU's memory is copied in its order into page-locked memory, by threads of its own, while what was
/// copied before is used. So every byte must be read, once, of each GPU about in ascending order, as write_image does.
class DeviceSource final : public MemorySource {
public:
    /// `moved_at` outlives it. Throws DriverError.
    DeviceSource(CustomStorage& storage, const std::vector<NumberedDevice>& devices,
                 MovedAt& moved_at);
    ~DeviceSource() override;

    /// Throws Error: io, also what a copy has failed with; bad_argument outside of the devices.
    void read(std::uint64_t address, MutBytes out) override;
    /// Of what was copied ahead. No more is, where what is lent lies in the way: never of more than half of the blocks.
    MutBytes lend(std::uint64_t address, std::size_t size) override;
    void take_back(std::uint64_t address, MutBytes lent) noexcept override;
    void cancel() noexcept override;

private:
    struct Device;
    std::vector<std::unique_ptr<Device>> devices_; ///< by number; nullptr: none
};

/// Clears all memory on the GPUs, so that only what is not zero has to cross to them.
class DeviceSink final : public MemorySink {
public:
    /// All of it is zero on return. As DeviceSource.
    DeviceSink(CustomStorage& storage, const std::vector<NumberedDevice>& devices,
               MovedAt& moved_at);
    ~DeviceSink() override;

    /// Begun on return. Throws Error: io; bad_argument outside of the devices.
    void write(std::uint64_t address, Bytes bytes) override;
    /// Nothing: it is so.
    void write_zeros(std::uint64_t address, std::uint64_t length) override;
    /// Page-locked, from which it is copied to the GPU. Never more than half of it.
    MutBytes lend(std::uint64_t address, std::size_t size) override;
    void put(std::uint64_t address, MutBytes lent) override;
    void take_back(std::uint64_t address, MutBytes lent) noexcept override;
    /// All that was written is there. Throws DriverError.
    void finish();

private:
    struct Device;
    std::vector<std::unique_ptr<Device>> devices_;
};

/// CustomStorage::restore() for the memory of an image with `info`, with what that needs: contexts on the GPUs that the
/// memory goes to, and if the driver says that this is not enough, on all others that the image lists and CUDA has here.
void begin_restore(CustomStorage& storage, int pid, const ImageInfo& info,
                   const std::vector<driver::GpuPair>& pairs, CustomStorage::Operation& into);

/// Put all of `image` into `devices`, which it must be of to the byte. What is there on an exception is of no use. Throws
/// Error: corrupt_data if the driver wants other memory, as ImageReader::restore; DriverError.
void fill_devices(CustomStorage& storage, const std::vector<NumberedDevice>& devices,
                  const ImageReader& image, unsigned threads, MovedAt& moved_at,
                  const ImageReader::Progress& progress = {});

} // namespace gpustasis
