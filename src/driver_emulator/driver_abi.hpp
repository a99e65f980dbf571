// SPDX-License-Identifier: Apache-2.0
/// Our declarations of the part of the CUDA driver API that the emulator has.
///
/// Source: cuda.h of CUDA 12.8, 13.0 and 13.5. tests/emulator compares every value and layout here with
/// the real header, so this one needs no CUDA toolkit to build.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpustasis::emulator {

/// CUresult.
enum class Result : int {
    success = 0,
    invalid_value = 1,
    out_of_memory = 2,
    not_initialized = 3,
    deinitialized = 4,
    no_device = 100,
    invalid_device = 101,
    invalid_image = 200,
    invalid_context = 201,
    no_binary_for_gpu = 209,
    unsupported_limit = 215,
    invalid_ptx = 218,
    invalid_source = 300,
    file_not_found = 301,
    shared_object_init_failed = 303,
    operating_system = 304,
    invalid_handle = 400,
    illegal_state = 401,
    not_found = 500,
    not_ready = 600,
    illegal_address = 700,
    launch_out_of_resources = 701,
    primary_context_active = 708,
    context_is_destroyed = 709,
    host_memory_already_registered = 712,
    host_memory_not_registered = 713,
    launch_failed = 719,
    not_permitted = 800,
    not_supported = 801,
    system_not_ready = 802,
    system_driver_mismatch = 803,
    stream_capture_unsupported = 900,
    stream_capture_invalidated = 901,
    unknown = 999,
};

/// CUprocessState. The last two exist from 13.4 on.
enum class ProcessState : int {
    running = 0,
    locked = 1,
    checkpointed = 2,
    failed = 3,
    checkpointing = 4,
    restoring = 5,
};

using DevicePtr = unsigned long long; ///< CUdeviceptr
using DeviceOrdinal = int;            ///< CUdevice

struct Uuid { ///< CUuuid
    unsigned char bytes[16];
    bool operator==(const Uuid&) const = default;
};

struct LockArgs { ///< CUcheckpointLockArgs
    unsigned int timeout_ms;
    unsigned int reserved0;
    std::uint64_t reserved1[7];
};

struct StorageDevice { ///< CUcheckpointCustomStoragePerDeviceData
    DevicePtr pointer;
    std::size_t size;
    void* stream;
};

struct StorageInfo { ///< CUcheckpointCustomStorageInfo
    void* handle;    ///< CUcheckpointOperationHandle
    StorageDevice* devices;
    unsigned int device_count;
};

/// CUcheckpointCheckpointArgs of 13.4; before that all of it is reserved.
struct CheckpointArgs {
    StorageInfo** storage; ///< customStorageInfo_out
    char reserved[56];
};

struct GpuPair { ///< CUcheckpointGpuPair
    Uuid old_uuid;
    Uuid new_uuid;
};

/// CUcheckpointRestoreArgs of 13.4. In 13.0 all behind the count is reserved, in 12.8 all of it.
struct RestoreArgs {
    const GpuPair* gpu_pairs;
    unsigned int gpu_pair_count;
    unsigned int padding0;
    StorageInfo** storage; ///< customStorageInfo_out
    char reserved[40];
};

struct UnlockArgs { ///< CUcheckpointUnlockArgs
    std::uint64_t reserved[8];
};

static_assert(sizeof(LockArgs) == 64 && sizeof(CheckpointArgs) == 64);
static_assert(sizeof(RestoreArgs) == 64 && sizeof(UnlockArgs) == 64 && sizeof(GpuPair) == 32);

/// CUmemorytype.
enum class MemoryType : unsigned int { host = 1, device = 2, array = 3, unified = 4 };

struct Memcpy2d { ///< CUDA_MEMCPY2D
    std::size_t src_x_in_bytes;
    std::size_t src_y;
    MemoryType src_memory_type;
    const void* src_host;
    DevicePtr src_device;
    void* src_array;
    std::size_t src_pitch;
    std::size_t dst_x_in_bytes;
    std::size_t dst_y;
    MemoryType dst_memory_type;
    void* dst_host;
    DevicePtr dst_device;
    void* dst_array;
    std::size_t dst_pitch;
    std::size_t width_in_bytes;
    std::size_t height;
};

/// CUstreamCaptureStatus.
enum class Capture : int { none = 0, active = 1, invalidated = 2 };

/// CUpointer_attribute, those that are answered.
enum class PointerAttribute : int {
    context = 1,
    memory_type = 2,
    device_pointer = 3,
    host_pointer = 4,
    buffer_id = 7,
    is_managed = 8,
    device_ordinal = 9,
    range_start_addr = 11,
    range_size = 12,
    mapped = 13,
};

struct LaunchAttribute; ///< CUlaunchAttribute; the emulator heeds none

struct LaunchConfig { ///< CUlaunchConfig
    unsigned int grid_x, grid_y, grid_z;
    unsigned int block_x, block_y, block_z;
    unsigned int shared_memory_size;
    void* stream;
    const LaunchAttribute* attributes;
    unsigned int attribute_count;
};

// Values that cuda.h has as macros or in enumerations that are otherwise of no interest.
inline constexpr std::uintptr_t kLaunchParamEnd = 0;           // CU_LAUNCH_PARAM_END
inline constexpr std::uintptr_t kLaunchParamBufferPointer = 1; // CU_LAUNCH_PARAM_BUFFER_POINTER
inline constexpr std::uintptr_t kLaunchParamBufferSize = 2;    // CU_LAUNCH_PARAM_BUFFER_SIZE
inline constexpr unsigned kStreamNonBlocking = 1;              // CU_STREAM_NON_BLOCKING
inline constexpr unsigned kEventDisableTiming = 2;             // CU_EVENT_DISABLE_TIMING
inline constexpr std::uintptr_t kStreamLegacy = 1;             // CU_STREAM_LEGACY
inline constexpr std::uintptr_t kStreamPerThread = 2;          // CU_STREAM_PER_THREAD

} // namespace gpustasis::emulator
