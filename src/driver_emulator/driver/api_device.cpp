// Devices and what they are.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace cudackpt::emulator;

CUDACKPT_API(cuDeviceGetCount)(int* count) {
    return call([=](Driver& state) {
        if (count == nullptr) {
            return Result::invalid_value;
        }
        *count = static_cast<int>(state.objects.device_count);
        return Result::success;
    });
}

CUDACKPT_API(cuDeviceGet)(DeviceOrdinal* device, int ordinal) {
    return call([=](Driver& state) {
        if (device == nullptr) {
            return Result::invalid_value;
        }
        if (static_cast<unsigned>(ordinal) >= state.objects.device_count) {
            return Result::invalid_device;
        }
        *device = ordinal;
        return Result::success;
    });
}
