// SPDX-License-Identifier: Apache-2.0
// libnvidia-ml.so.1: what the emulated GPUs are called and hold, for tools that list GPUs.
#include "driver_emulator/driver/daemon_link.hpp"

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>

using namespace gpustasis::emulator;

#define NVML_API(name) extern "C" __attribute__((visibility("default"))) nvml_result name

// C types of nvml.h.
using nvml_result = int;
using nvml_device = const GpuInfo*;

struct nvml_memory {
    unsigned long long total, free, used;
};

struct nvml_process { // nvmlProcessInfo_t
    unsigned pid;
    unsigned long long used;
    unsigned gpu_instance, compute_instance;
};

namespace {

constexpr nvml_result kSuccess = 0;
constexpr nvml_result kUninitialized = 1;
constexpr nvml_result kInvalidArgument = 2;
constexpr nvml_result kNotSupported = 3;
constexpr nvml_result kNotFound = 6;
constexpr nvml_result kInsufficientSize = 7;
constexpr nvml_result kDriverNotLoaded = 9;
constexpr unsigned kNoInstance = ~0U;               // not a MIG slice
constexpr unsigned long long kNotAvailable = ~0ULL; // NVML_VALUE_NOT_AVAILABLE

DaemonInfo machine; // as of the first nvmlInit; memory in use is asked for anew
// nvmlShutdown ends it for all callers only when each nvmlInit has had one ("NVML API Reference", Initialization
// and Cleanup).
std::mutex init_mutex;
std::atomic<unsigned> initialised = 0;

nvml_result give_text(char* to, unsigned size, const char* text) {
    if (!initialised) {
        return kUninitialized;
    }
    if (to == nullptr) {
        return kInvalidArgument;
    }
    if (std::strlen(text) >= size) {
        return kInsufficientSize;
    }
    std::strcpy(to, text);
    return kSuccess;
}

bool is_device(nvml_device device) {
    return device >= machine.gpus && device < machine.gpus + machine.gpu_count;
}

} // namespace

NVML_API(nvmlInit_v2)() {
    const std::lock_guard lock(init_mutex);
    if (initialised == 0 && !ask_info(machine)) {
        return kDriverNotLoaded;
    }
    ++initialised;
    return kSuccess;
}

NVML_API(nvmlShutdown)() {
    const std::lock_guard lock(init_mutex);
    if (initialised == 0) {
        return kUninitialized;
    }
    --initialised;
    return kSuccess;
}

NVML_API(nvmlSystemGetDriverVersion)(char* version, unsigned size) {
    return give_text(version, size, machine.driver_version);
}

NVML_API(nvmlSystemGetCudaDriverVersion_v2)(int* version) {
    if (version == nullptr) {
        return kInvalidArgument;
    }
    *version = machine.api_version;
    return initialised ? kSuccess : kUninitialized;
}

NVML_API(nvmlDeviceGetCount_v2)(unsigned* count) {
    if (count == nullptr) {
        return kInvalidArgument;
    }
    *count = machine.gpu_count;
    return initialised ? kSuccess : kUninitialized;
}

NVML_API(nvmlDeviceGetHandleByIndex_v2)(unsigned index, nvml_device* device) {
    if (!initialised) {
        return kUninitialized;
    }
    if (device == nullptr || index >= machine.gpu_count) {
        return kInvalidArgument;
    }
    *device = &machine.gpus[index];
    return kSuccess;
}

NVML_API(nvmlDeviceGetHandleByPciBusId_v2)(const char* id, nvml_device* device) {
    if (!initialised) {
        return kUninitialized;
    }
    unsigned bus = 0;
    if (device == nullptr || id == nullptr || std::sscanf(id, "%*x:%x:", &bus) != 1) {
        return kInvalidArgument;
    }
    const unsigned index = bus - static_cast<unsigned>(kFirstPciBus);
    if (index >= machine.gpu_count) {
        return kNotFound;
    }
    *device = &machine.gpus[index];
    return kSuccess;
}

NVML_API(nvmlDeviceGetName)(nvml_device device, char* name, unsigned size) {
    return is_device(device) ? give_text(name, size, device->name) : kInvalidArgument;
}

NVML_API(nvmlDeviceGetUUID)(nvml_device device, char* uuid, unsigned size) {
    if (!is_device(device)) {
        return kInvalidArgument;
    }
    const unsigned char* b = device->uuid.bytes;
    char text[64];
    std::snprintf(text, sizeof text,
                  "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0],
                  b[1], b[2], b[3], b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13],
                  b[14], b[15]);
    return give_text(uuid, size, text);
}

NVML_API(nvmlDeviceGetMemoryInfo)(nvml_device device, nvml_memory* memory) {
    if (!initialised) {
        return kUninitialized;
    }
    if (!is_device(device) || memory == nullptr) {
        return kInvalidArgument;
    }
    const auto index = device - machine.gpus;
    DaemonInfo now{};
    if (!ask_info(now)) {
        return kDriverNotLoaded;
    }
    if (now.nvml_memory != 0) {
        return kNotSupported;
    }
    memory->total = now.gpus[index].memory;
    memory->used = now.gpus[index].used;
    memory->free = memory->total - memory->used;
    return kSuccess;
}

NVML_API(nvmlDeviceGetMinorNumber)(nvml_device device, unsigned* minor) {
    if (!is_device(device) || minor == nullptr) {
        return kInvalidArgument;
    }
    *minor = device->minor;
    return initialised ? kSuccess : kUninitialized;
}

NVML_API(nvmlDeviceGetPersistenceMode)(nvml_device device, int* mode) {
    if (!is_device(device) || mode == nullptr) {
        return kInvalidArgument;
    }
    DaemonInfo now{};
    if (!ask_info(now)) {
        return kDriverNotLoaded;
    }
    *mode = now.persistence != 0 ? 1 : 0;
    return initialised ? kSuccess : kUninitialized;
}

NVML_API(nvmlDeviceGetComputeRunningProcesses_v3)
(nvml_device device, unsigned* count, nvml_process* processes) {
    if (!is_device(device) || count == nullptr || (processes == nullptr && *count != 0)) {
        return kInvalidArgument;
    }
    DaemonInfo now{};
    static ProcessList list; // large; callers take turns, as those of nvmlInit do
    if (!ask_info(now) || !ask_processes(device->minor, list)) {
        return kDriverNotLoaded;
    }
    if (now.nvml_processes == 1) {
        return kNotSupported;
    }
    const unsigned room = *count;
    *count = list.count;
    if (room < list.count) {
        return kInsufficientSize;
    }
    for (unsigned i = 0; i < list.count; ++i) {
        const auto used = now.nvml_processes == 2 ? kNotAvailable : list.entries[i].used;
        processes[i] = {static_cast<unsigned>(list.entries[i].pid), used, kNoInstance, kNoInstance};
    }
    return kSuccess;
}

extern "C" __attribute__((visibility("default"))) const char* nvmlErrorString(nvml_result result) {
    switch (result) {
    case kSuccess: return "Success";
    case kUninitialized: return "Uninitialized";
    case kInvalidArgument: return "Invalid Argument";
    case kNotSupported: return "Not Supported";
    case kNotFound: return "Not Found";
    case kInsufficientSize: return "Insufficient Size";
    case kDriverNotLoaded: return "Driver Not Loaded";
    default: return "Unknown Error";
    }
}
