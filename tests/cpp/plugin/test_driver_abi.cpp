// SPDX-License-Identifier: Apache-2.0
/// Our declarations of the driver's checkpoint API against NVIDIA's. Nothing to run.
#include "core/image_info.hpp"
#include "device_memory/driver_abi.hpp"

#include <cuda.h>

#include <cstddef>

using namespace gpustasis;
using namespace gpustasis::driver;

static_assert(sizeof(LockArgs) == sizeof(CUcheckpointLockArgs));
static_assert(offsetof(LockArgs, timeout_ms) == offsetof(CUcheckpointLockArgs, timeoutMs));
static_assert(sizeof(GpuPair) == sizeof(CUcheckpointGpuPair));
static_assert(offsetof(GpuPair, new_uuid) == offsetof(CUcheckpointGpuPair, newUuid));
static_assert(sizeof(RestoreArgs) == sizeof(CUcheckpointRestoreArgs));
#if CUDA_VERSION >= 13000
static_assert(offsetof(RestoreArgs, gpu_pairs) == offsetof(CUcheckpointRestoreArgs, gpuPairs));
static_assert(offsetof(RestoreArgs, gpu_pairs_count) ==
              offsetof(CUcheckpointRestoreArgs, gpuPairsCount));
#endif
static_assert(static_cast<int>(ProcessState::running) == CU_PROCESS_STATE_RUNNING);
static_assert(static_cast<int>(ProcessState::locked) == CU_PROCESS_STATE_LOCKED);
static_assert(static_cast<int>(ProcessState::checkpointed) == CU_PROCESS_STATE_CHECKPOINTED);
static_assert(static_cast<int>(ProcessState::failed) == CU_PROCESS_STATE_FAILED);
static_assert(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
static_assert(kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
static_assert(kOperatingSystem == CUDA_ERROR_OPERATING_SYSTEM);
static_assert(kIllegalState == CUDA_ERROR_ILLEGAL_STATE);
static_assert(kNotReady == CUDA_ERROR_NOT_READY);

int main() {}
