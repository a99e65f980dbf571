// SPDX-License-Identifier: Apache-2.0
/// Of device_copy.hpp: what puts an image back onto GPUs.
#include "core/error.hpp"
#include "device_memory/device_copy.hpp"
#include "device_memory/driver_error.hpp"

#include <cstddef>
#include <cstring>
#include <optional>
#include <vector>

namespace gpustasis {

void begin_restore(CustomStorage& storage, int pid, const ImageInfo& info,
                   const std::vector<driver::GpuPair>& pairs, CustomStorage::Operation& into) {
    const auto now_at = [&](std::size_t number) {
        Id uuid = info.gpus[number].uuid;
        for (const driver::GpuPair& pair : pairs)
            if (std::memcmp(pair.old_uuid, info.gpus[number].uuid.data(), sizeof pair.old_uuid) ==
                0)
                std::memcpy(uuid.data(), pair.new_uuid, sizeof pair.new_uuid);
        return uuid;
    };
    std::vector<Id> gpus;
    for (const std::size_t number : numbers_of(info))
        if (const Id gpu = now_at(number); gpu != Id{}) // else the driver did not say which
            gpus.push_back(gpu);
    storage.reserve(gpus, into); // once the driver has answered, the process lacks its memory
    try {
        return storage.restore(pid, pairs, into);
    } catch (const DriverError& e) {
        if (e.result() != driver::kInvalidContext)
            throw;
    }
    // The driver wants contexts on every GPU that the process may use, also where it has no memory. One that has no room
    // for a context may be none of them: only the driver knows.
    std::optional<DriverError> failed;
    for (std::size_t number = 0; number < info.gpus.size(); ++number) {
        try {
            storage.prepare({now_at(number)}, 0);
        } catch (const DriverError& e) {
            failed = failed ? failed : e;
        } catch (const Error&) { // NOLINT(bugprone-empty-catch): not a GPU of this machine
        }
    }
    try {
        return storage.restore(pid, pairs, into);
    } catch (const DriverError& e) {
        if (failed && e.result() == driver::kInvalidContext)
            throw *failed;
        throw;
    }
}

void fill_devices(CustomStorage& storage, const std::vector<NumberedDevice>& devices,
                  const ImageReader& image, unsigned threads, MovedAt& moved_at,
                  const ImageReader::Progress& progress) {
    if (regions_of(sizes_of(devices)) != image.info().regions)
        throw Error(Errc::corrupt_data, "the driver wants other memory than the image holds");
    DeviceSink sink(storage, devices, moved_at);
    image.restore(sink, threads, true, progress);
    sink.finish();
}

} // namespace gpustasis
