// SPDX-License-Identifier: Apache-2.0
// Compiles if our declarations of the driver's ABI are those of this cuda.h.
#include <cuda.h>

#include "driver_emulator/driver_abi.hpp"

#include <cstddef>

namespace ours = gpustasis::emulator;

#define SAME(theirs, mine)                                                                         \
    static_assert(static_cast<long long>(theirs) == static_cast<long long>(mine))
#define SAME_LAYOUT(theirs, mine) static_assert(sizeof(theirs) == sizeof(mine))
#define SAME_FIELD(theirs, field, mine, our_field)                                                 \
    static_assert(offsetof(theirs, field) == offsetof(mine, our_field) &&                          \
                  sizeof(theirs::field) == sizeof(mine::our_field))

SAME(CUDA_SUCCESS, ours::Result::success);
SAME(CUDA_ERROR_INVALID_VALUE, ours::Result::invalid_value);
SAME(CUDA_ERROR_OUT_OF_MEMORY, ours::Result::out_of_memory);
SAME(CUDA_ERROR_NOT_INITIALIZED, ours::Result::not_initialized);
SAME(CUDA_ERROR_DEINITIALIZED, ours::Result::deinitialized);
SAME(CUDA_ERROR_NO_DEVICE, ours::Result::no_device);
SAME(CUDA_ERROR_INVALID_DEVICE, ours::Result::invalid_device);
SAME(CUDA_ERROR_INVALID_IMAGE, ours::Result::invalid_image);
SAME(CUDA_ERROR_INVALID_CONTEXT, ours::Result::invalid_context);
SAME(CUDA_ERROR_NO_BINARY_FOR_GPU, ours::Result::no_binary_for_gpu);
SAME(CUDA_ERROR_UNSUPPORTED_LIMIT, ours::Result::unsupported_limit);
SAME(CUDA_ERROR_INVALID_PTX, ours::Result::invalid_ptx);
SAME(CUDA_ERROR_INVALID_SOURCE, ours::Result::invalid_source);
SAME(CUDA_ERROR_FILE_NOT_FOUND, ours::Result::file_not_found);
SAME(CUDA_ERROR_SHARED_OBJECT_INIT_FAILED, ours::Result::shared_object_init_failed);
SAME(CUDA_ERROR_OPERATING_SYSTEM, ours::Result::operating_system);
SAME(CUDA_ERROR_INVALID_HANDLE, ours::Result::invalid_handle);
SAME(CUDA_ERROR_ILLEGAL_STATE, ours::Result::illegal_state);
SAME(CUDA_ERROR_NOT_FOUND, ours::Result::not_found);
SAME(CUDA_ERROR_NOT_READY, ours::Result::not_ready);
SAME(CUDA_ERROR_ILLEGAL_ADDRESS, ours::Result::illegal_address);
SAME(CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES, ours::Result::launch_out_of_resources);
SAME(CUDA_ERROR_PRIMARY_CONTEXT_ACTIVE, ours::Result::primary_context_active);
SAME(CUDA_ERROR_CONTEXT_IS_DESTROYED, ours::Result::context_is_destroyed);
SAME(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, ours::Result::host_memory_already_registered);
SAME(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, ours::Result::host_memory_not_registered);
SAME(CUDA_ERROR_LAUNCH_FAILED, ours::Result::launch_failed);
SAME(CUDA_ERROR_NOT_PERMITTED, ours::Result::not_permitted);
SAME(CUDA_ERROR_NOT_SUPPORTED, ours::Result::not_supported);
SAME(CUDA_ERROR_SYSTEM_NOT_READY, ours::Result::system_not_ready);
SAME(CUDA_ERROR_SYSTEM_DRIVER_MISMATCH, ours::Result::system_driver_mismatch);
SAME(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED, ours::Result::stream_capture_unsupported);
SAME(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED, ours::Result::stream_capture_invalidated);
SAME(CUDA_ERROR_UNKNOWN, ours::Result::unknown);

SAME(CU_PROCESS_STATE_RUNNING, ours::ProcessState::running);
SAME(CU_PROCESS_STATE_LOCKED, ours::ProcessState::locked);
SAME(CU_PROCESS_STATE_CHECKPOINTED, ours::ProcessState::checkpointed);
SAME(CU_PROCESS_STATE_FAILED, ours::ProcessState::failed);
SAME(CU_PROCESS_STATE_CHECKPOINTING, ours::ProcessState::checkpointing);
SAME(CU_PROCESS_STATE_RESTORING, ours::ProcessState::restoring);
SAME(CU_STREAM_CAPTURE_STATUS_NONE, ours::Capture::none);
SAME(CU_STREAM_CAPTURE_STATUS_ACTIVE, ours::Capture::active);
SAME(CU_STREAM_CAPTURE_STATUS_INVALIDATED, ours::Capture::invalidated);

SAME_LAYOUT(CUdeviceptr, ours::DevicePtr);
SAME_LAYOUT(CUuuid, ours::Uuid);
SAME_LAYOUT(CUcheckpointLockArgs, ours::LockArgs);
SAME_FIELD(CUcheckpointLockArgs, timeoutMs, ours::LockArgs, timeout_ms);
SAME_FIELD(CUcheckpointLockArgs, reserved0, ours::LockArgs, reserved0);
SAME_FIELD(CUcheckpointLockArgs, reserved1, ours::LockArgs, reserved1);
SAME_LAYOUT(CUcheckpointCheckpointArgs, ours::CheckpointArgs);
SAME_LAYOUT(CUcheckpointRestoreArgs, ours::RestoreArgs);
SAME_LAYOUT(CUcheckpointUnlockArgs, ours::UnlockArgs);
SAME_FIELD(CUcheckpointCheckpointArgs, customStorageInfo_out, ours::CheckpointArgs, storage);
SAME_FIELD(CUcheckpointCheckpointArgs, reserved, ours::CheckpointArgs, reserved);
SAME_FIELD(CUcheckpointRestoreArgs, padding0, ours::RestoreArgs, padding0);
SAME_FIELD(CUcheckpointRestoreArgs, customStorageInfo_out, ours::RestoreArgs, storage);
SAME_FIELD(CUcheckpointRestoreArgs, reserved, ours::RestoreArgs, reserved);
SAME_LAYOUT(CUcheckpointCustomStorageInfo, ours::StorageInfo);
SAME_FIELD(CUcheckpointCustomStorageInfo, handle, ours::StorageInfo, handle);
SAME_FIELD(CUcheckpointCustomStorageInfo, perDeviceData, ours::StorageInfo, devices);
SAME_FIELD(CUcheckpointCustomStorageInfo, deviceCount, ours::StorageInfo, device_count);
SAME_LAYOUT(CUcheckpointCustomStoragePerDeviceData, ours::StorageDevice);
SAME_FIELD(CUcheckpointCustomStoragePerDeviceData, devPtr, ours::StorageDevice, pointer);
SAME_FIELD(CUcheckpointCustomStoragePerDeviceData, size, ours::StorageDevice, size);
SAME_FIELD(CUcheckpointCustomStoragePerDeviceData, stream, ours::StorageDevice, stream);
SAME_LAYOUT(CUcheckpointGpuPair, ours::GpuPair);
SAME_FIELD(CUcheckpointGpuPair, oldUuid, ours::GpuPair, old_uuid);
SAME_FIELD(CUcheckpointGpuPair, newUuid, ours::GpuPair, new_uuid);
SAME_FIELD(CUcheckpointRestoreArgs, gpuPairs, ours::RestoreArgs, gpu_pairs);
SAME_FIELD(CUcheckpointRestoreArgs, gpuPairsCount, ours::RestoreArgs, gpu_pair_count);

SAME_LAYOUT(CUDA_MEMCPY2D, ours::Memcpy2d);
SAME_FIELD(CUDA_MEMCPY2D, srcDevice, ours::Memcpy2d, src_device);
SAME_FIELD(CUDA_MEMCPY2D, srcPitch, ours::Memcpy2d, src_pitch);
SAME_FIELD(CUDA_MEMCPY2D, dstMemoryType, ours::Memcpy2d, dst_memory_type);
SAME_FIELD(CUDA_MEMCPY2D, dstHost, ours::Memcpy2d, dst_host);
SAME_FIELD(CUDA_MEMCPY2D, Height, ours::Memcpy2d, height);
SAME(CU_MEMORYTYPE_HOST, ours::MemoryType::host);
SAME(CU_MEMORYTYPE_DEVICE, ours::MemoryType::device);
SAME(CU_MEMORYTYPE_ARRAY, ours::MemoryType::array);
SAME(CU_MEMORYTYPE_UNIFIED, ours::MemoryType::unified);

SAME_LAYOUT(CUlaunchConfig, ours::LaunchConfig);
SAME_FIELD(CUlaunchConfig, gridDimX, ours::LaunchConfig, grid_x);
SAME_FIELD(CUlaunchConfig, blockDimZ, ours::LaunchConfig, block_z);
SAME_FIELD(CUlaunchConfig, sharedMemBytes, ours::LaunchConfig, shared_memory_size);
SAME_FIELD(CUlaunchConfig, hStream, ours::LaunchConfig, stream);
SAME_FIELD(CUlaunchConfig, numAttrs, ours::LaunchConfig, attribute_count);

SAME(CU_POINTER_ATTRIBUTE_CONTEXT, ours::PointerAttribute::context);
SAME(CU_POINTER_ATTRIBUTE_MEMORY_TYPE, ours::PointerAttribute::memory_type);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_POINTER, ours::PointerAttribute::device_pointer);
SAME(CU_POINTER_ATTRIBUTE_HOST_POINTER, ours::PointerAttribute::host_pointer);
SAME(CU_POINTER_ATTRIBUTE_BUFFER_ID, ours::PointerAttribute::buffer_id);
SAME(CU_POINTER_ATTRIBUTE_IS_MANAGED, ours::PointerAttribute::is_managed);
SAME(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, ours::PointerAttribute::device_ordinal);
SAME(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, ours::PointerAttribute::range_start_addr);
SAME(CU_POINTER_ATTRIBUTE_RANGE_SIZE, ours::PointerAttribute::range_size);
SAME(CU_POINTER_ATTRIBUTE_MAPPED, ours::PointerAttribute::mapped);

SAME(CU_LAUNCH_PARAM_END_AS_INT, ours::kLaunchParamEnd);
SAME(CU_LAUNCH_PARAM_BUFFER_POINTER_AS_INT, ours::kLaunchParamBufferPointer);
SAME(CU_LAUNCH_PARAM_BUFFER_SIZE_AS_INT, ours::kLaunchParamBufferSize);
SAME(CU_STREAM_NON_BLOCKING, ours::kStreamNonBlocking);
SAME(CU_EVENT_DISABLE_TIMING, ours::kEventDisableTiming);

// What api_device.cpp has by number.
SAME(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK, 1);
SAME(CU_DEVICE_ATTRIBUTE_WARP_SIZE, 10);
SAME(CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 16);
SAME(CU_DEVICE_ATTRIBUTE_PCI_BUS_ID, 33);
SAME(CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_MULTIPROCESSOR, 39);
SAME(CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING, 41);
SAME(CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, 75);
SAME(CU_DEVICE_ATTRIBUTE_STREAM_PRIORITIES_SUPPORTED, 78);
SAME(CU_DEVICE_ATTRIBUTE_HOST_REGISTER_SUPPORTED, 99);

int main() {
    return 0;
}
