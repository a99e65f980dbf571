// SPDX-License-Identifier: Apache-2.0
// Devices and what they are.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

#include <cstdio>
#include <cstring>
#include <iterator>

using namespace gpustasis::emulator;

namespace {

constexpr int kLastAttribute = 200; // beyond what any cuda.h has so far

struct Attribute {
    int number; ///< CUdevice_attribute
    int value;
};

/// Of an emulated chip: capability 8.0, but with none of what the emulator cannot do. Others are 0.
constexpr Attribute kAttributes[] = {
    {1, 1024},        // MAX_THREADS_PER_BLOCK
    {2, 1024},        // MAX_BLOCK_DIM_X
    {3, 1024},        // MAX_BLOCK_DIM_Y
    {4, 64},          // MAX_BLOCK_DIM_Z
    {5, 2147483647},  // MAX_GRID_DIM_X
    {6, 65535},       // MAX_GRID_DIM_Y
    {7, 65535},       // MAX_GRID_DIM_Z
    {10, 32},         // WARP_SIZE
    {11, 2147483647}, // MAX_PITCH
    {12, 65536},      // MAX_REGISTERS_PER_BLOCK
    {13, 1000000},    // CLOCK_RATE, kHz
    {14, 512},        // TEXTURE_ALIGNMENT
    {16, 1},          // MULTIPROCESSOR_COUNT
    {36, 1000000},    // MEMORY_CLOCK_RATE, kHz
    {37, 256},        // GLOBAL_MEMORY_BUS_WIDTH, bits
    {38, 4194304},    // L2_CACHE_SIZE
    {39, 2048},       // MAX_THREADS_PER_MULTIPROCESSOR
    {41, 1},          // UNIFIED_ADDRESSING
    {75, 8},          // COMPUTE_CAPABILITY_MAJOR
    {76, 0},          // COMPUTE_CAPABILITY_MINOR
    {78, 1},          // STREAM_PRIORITIES_SUPPORTED
    {82, 65536},      // MAX_REGISTERS_PER_MULTIPROCESSOR
    {99, 1},          // HOST_REGISTER_SUPPORTED
};
constexpr int kPciBusId = 33;

template <typename Body>
int with_device(DeviceOrdinal ordinal, Body body) {
    return call([=, &body](Driver& driver) {
        const auto index = static_cast<unsigned>(ordinal);
        return index < driver.objects.device_count ? body(driver, index) : Result::invalid_device;
    });
}

int give_uuid(Uuid* uuid, DeviceOrdinal ordinal) {
    return with_device(ordinal, [=](Driver& driver, unsigned index) {
        if (uuid == nullptr) {
            return Result::invalid_value;
        }
        *uuid = driver.objects.devices[index].uuid;
        return Result::success;
    });
}

} // namespace

GPUSTASIS_API(cuDeviceGetCount)(int* count) {
    return call([=](Driver& driver) {
        if (count == nullptr) {
            return Result::invalid_value;
        }
        *count = static_cast<int>(driver.objects.device_count);
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceGet)(DeviceOrdinal* device, int ordinal) {
    return with_device(ordinal, [=](Driver&, unsigned) {
        if (device == nullptr) {
            return Result::invalid_value;
        }
        *device = ordinal;
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceGetName)(char* name, int size, DeviceOrdinal ordinal) {
    return with_device(ordinal, [=](Driver& driver, unsigned index) {
        if (name == nullptr || size <= 0) {
            return Result::invalid_value;
        }
        std::snprintf(name, static_cast<std::size_t>(size), "%s", driver.info.gpus[index].name);
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceGetUuid)(Uuid* uuid, DeviceOrdinal ordinal) {
    return give_uuid(uuid, ordinal);
}

GPUSTASIS_API(cuDeviceGetUuid_v2)(Uuid* uuid, DeviceOrdinal ordinal) {
    return give_uuid(uuid, ordinal);
}

GPUSTASIS_API(cuDeviceTotalMem_v2)(std::size_t* bytes, DeviceOrdinal ordinal) {
    return with_device(ordinal, [=](Driver& driver, unsigned index) {
        if (bytes == nullptr) {
            return Result::invalid_value;
        }
        *bytes = driver.info.gpus[index].memory;
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceGetAttribute)(int* value, int attribute, DeviceOrdinal ordinal) {
    return with_device(ordinal, [=](Driver&, unsigned index) {
        if (value == nullptr || attribute <= 0 || attribute > kLastAttribute) {
            return Result::invalid_value;
        }
        *value = attribute == kPciBusId ? kFirstPciBus + static_cast<int>(index) : 0;
        for (const Attribute& known : kAttributes) {
            if (known.number == attribute) {
                *value = known.value;
            }
        }
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceComputeCapability)(int* major, int* minor, DeviceOrdinal ordinal) {
    const int result = cuDeviceGetAttribute(major, 75, ordinal);
    return result != 0 ? result : cuDeviceGetAttribute(minor, 76, ordinal);
}

GPUSTASIS_API(cuDeviceGetPCIBusId)(char* id, int size, DeviceOrdinal ordinal) {
    return with_device(ordinal, [=](Driver&, unsigned index) {
        char text[16];
        std::snprintf(text, sizeof text, "0000:%02x:00.0",
                      static_cast<unsigned>(kFirstPciBus) + index);
        if (id == nullptr || size <= static_cast<int>(std::strlen(text))) {
            return Result::invalid_value;
        }
        std::strcpy(id, text);
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceGetByPCIBusId)(DeviceOrdinal* device, const char* id) {
    return call([=](Driver& driver) {
        unsigned bus = 0;
        if (device == nullptr || id == nullptr || std::sscanf(id, "%*x:%x:", &bus) != 1) {
            return Result::invalid_value;
        }
        const unsigned index = bus - kFirstPciBus;
        if (index >= driver.objects.device_count) {
            return Result::invalid_device;
        }
        *device = static_cast<DeviceOrdinal>(index);
        return Result::success;
    });
}

GPUSTASIS_API(cuDeviceCanAccessPeer)(int* can, DeviceOrdinal ordinal, DeviceOrdinal peer) {
    return with_device(ordinal, [=](Driver& driver, unsigned) {
        if (can == nullptr || static_cast<unsigned>(peer) >= driver.objects.device_count) {
            return can == nullptr ? Result::invalid_value : Result::invalid_device;
        }
        *can = 0;
        return Result::success;
    });
}
