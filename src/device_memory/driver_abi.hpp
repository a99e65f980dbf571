// SPDX-License-Identifier: Apache-2.0
/// Our own declarations of the driver's process-checkpoint API, so that building needs no CUDA
/// toolkit. Source: cuda.h 13.5, "CUDA Checkpointing"; tests/cpp/plugin/test_driver_abi.cpp
/// compares every size and value with the real cuda.h.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpustasis::driver {

using Result = int; ///< CUresult

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kInvalidContext = 201;
inline constexpr Result kOperatingSystem = 304;
inline constexpr Result kIllegalState = 401;
inline constexpr Result kNotReady = 600;

/// CUcheckpointLockArgs
struct LockArgs {
    std::uint32_t timeout_ms = 0; ///< 0 waits for ever
    std::uint32_t reserved0 = 0;
    std::uint64_t reserved1[7] = {};
};

/// CUcheckpointGpuPair: restore what lived on `old_uuid` onto `new_uuid`
struct GpuPair {
    std::uint8_t old_uuid[16];
    std::uint8_t new_uuid[16];
};

using DevicePtr = std::uint64_t; ///< CUdeviceptr
using Stream = void*;            ///< CUstream
using Context = void*;           ///< CUcontext

/// CUcheckpointCustomStoragePerDeviceData: what one GPU has of the process, mapped in the process that calls
struct StoragePerDevice {
    DevicePtr address = 0;
    std::size_t size = 0;
    Stream stream = nullptr; ///< of that GPU's primary context
};

/// CUcheckpointCustomStorageInfo: allocated by the driver, and freed by cuCheckpointOperationComplete
struct StorageInfo {
    void* handle = nullptr;
    StoragePerDevice* per_device = nullptr;
    std::uint32_t device_count = 0;
};

/// CUcheckpointCheckpointArgs (13.4; before that all of it is reserved and must be zero)
struct CheckpointArgs {
    StorageInfo** storage = nullptr; ///< nullptr: the driver stages the memory in the process
    std::uint8_t reserved[56] = {};
};

/// CUcheckpointRestoreArgs (13.4; `storage` must be zero before, and before 13.0 all of it)
struct RestoreArgs {
    GpuPair* gpu_pairs = nullptr;
    std::uint32_t gpu_pairs_count = 0;
    std::uint32_t padding0 = 0;
    StorageInfo** storage = nullptr; ///< nullptr: the memory is in the process
    std::uint8_t reserved[40] = {};
};

static_assert(sizeof(LockArgs) == 64 && sizeof(GpuPair) == 32 && sizeof(CheckpointArgs) == 64 &&
              sizeof(RestoreArgs) == 64 && sizeof(StorageInfo) == 24 &&
              sizeof(StoragePerDevice) == 24);

/// First API version whose Restore takes GPU pairs.
inline constexpr std::uint32_t kGpuPairsApiVersion = 13000;
/// First API version whose Checkpoint and Restore hand the memory over (custom storage).
inline constexpr std::uint32_t kCustomStorageApiVersion = 13040;

/// CUprocessState beyond core's ProcessState: in flight under CUDA 13.4's custom storage.
inline constexpr int kStateCheckpointing = 4;
inline constexpr int kStateRestoring = 5;

} // namespace gpustasis::driver
