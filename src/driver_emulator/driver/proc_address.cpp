// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/proc_address.hpp"

#include <cstring>

// name, CUDA version from which it means this entry point, entry point (source: cudaTypedefs.h)
#define GPUSTASIS_ENTRY_POINTS(X)                                                                  \
    X(cuCheckpointOperationComplete, 13040, cuCheckpointOperationComplete)                         \
    X(cuCheckpointProcessCheckpoint, 12080, cuCheckpointProcessCheckpoint)                         \
    X(cuCheckpointProcessGetRestoreThreadId, 12080, cuCheckpointProcessGetRestoreThreadId)         \
    X(cuCheckpointProcessGetState, 12080, cuCheckpointProcessGetState)                             \
    X(cuCheckpointProcessLock, 12080, cuCheckpointProcessLock)                                     \
    X(cuCheckpointProcessRestore, 12080, cuCheckpointProcessRestore)                               \
    X(cuCheckpointProcessUnlock, 12080, cuCheckpointProcessUnlock)                                 \
    X(cuCtxCreate, 2000, cuCtxCreate)                                                              \
    X(cuCtxCreate, 3020, cuCtxCreate_v2)                                                           \
    X(cuCtxCreate, 11040, cuCtxCreate_v3)                                                          \
    X(cuCtxCreate, 12050, cuCtxCreate_v4)                                                          \
    X(cuCtxDestroy, 2000, cuCtxDestroy)                                                            \
    X(cuCtxDestroy, 4000, cuCtxDestroy_v2)                                                         \
    X(cuCtxGetApiVersion, 3020, cuCtxGetApiVersion)                                                \
    X(cuCtxGetCurrent, 4000, cuCtxGetCurrent)                                                      \
    X(cuCtxGetDevice, 2000, cuCtxGetDevice)                                                        \
    X(cuCtxGetDevice, 13000, cuCtxGetDevice_v2)                                                    \
    X(cuCtxGetFlags, 7000, cuCtxGetFlags)                                                          \
    X(cuCtxGetId, 12000, cuCtxGetId)                                                               \
    X(cuCtxGetLimit, 3010, cuCtxGetLimit)                                                          \
    X(cuCtxGetStreamPriorityRange, 5050, cuCtxGetStreamPriorityRange)                              \
    X(cuCtxPopCurrent, 2000, cuCtxPopCurrent)                                                      \
    X(cuCtxPopCurrent, 4000, cuCtxPopCurrent_v2)                                                   \
    X(cuCtxPushCurrent, 2000, cuCtxPushCurrent)                                                    \
    X(cuCtxPushCurrent, 4000, cuCtxPushCurrent_v2)                                                 \
    X(cuCtxSetCurrent, 4000, cuCtxSetCurrent)                                                      \
    X(cuCtxSetLimit, 3010, cuCtxSetLimit)                                                          \
    X(cuCtxSynchronize, 2000, cuCtxSynchronize)                                                    \
    X(cuCtxSynchronize, 13000, cuCtxSynchronize_v2)                                                \
    X(cuDeviceCanAccessPeer, 4000, cuDeviceCanAccessPeer)                                          \
    X(cuDeviceComputeCapability, 2000, cuDeviceComputeCapability)                                  \
    X(cuDeviceGet, 2000, cuDeviceGet)                                                              \
    X(cuDeviceGetAttribute, 2000, cuDeviceGetAttribute)                                            \
    X(cuDeviceGetByPCIBusId, 4010, cuDeviceGetByPCIBusId)                                          \
    X(cuDeviceGetCount, 2000, cuDeviceGetCount)                                                    \
    X(cuDeviceGetName, 2000, cuDeviceGetName)                                                      \
    X(cuDeviceGetPCIBusId, 4010, cuDeviceGetPCIBusId)                                              \
    X(cuDeviceGetUuid, 9020, cuDeviceGetUuid)                                                      \
    X(cuDeviceGetUuid, 11040, cuDeviceGetUuid_v2)                                                  \
    X(cuDevicePrimaryCtxGetState, 7000, cuDevicePrimaryCtxGetState)                                \
    X(cuDevicePrimaryCtxRelease, 7000, cuDevicePrimaryCtxRelease)                                  \
    X(cuDevicePrimaryCtxRelease, 11000, cuDevicePrimaryCtxRelease_v2)                              \
    X(cuDevicePrimaryCtxReset, 7000, cuDevicePrimaryCtxReset)                                      \
    X(cuDevicePrimaryCtxReset, 11000, cuDevicePrimaryCtxReset_v2)                                  \
    X(cuDevicePrimaryCtxRetain, 7000, cuDevicePrimaryCtxRetain)                                    \
    X(cuDevicePrimaryCtxSetFlags, 7000, cuDevicePrimaryCtxSetFlags)                                \
    X(cuDevicePrimaryCtxSetFlags, 11000, cuDevicePrimaryCtxSetFlags_v2)                            \
    X(cuDeviceTotalMem, 2000, cuDeviceTotalMem)                                                    \
    X(cuDeviceTotalMem, 3020, cuDeviceTotalMem_v2)                                                 \
    X(cuDriverGetVersion, 2020, cuDriverGetVersion)                                                \
    X(cuEventCreate, 2000, cuEventCreate)                                                          \
    X(cuEventDestroy, 2000, cuEventDestroy)                                                        \
    X(cuEventDestroy, 4000, cuEventDestroy_v2)                                                     \
    X(cuEventElapsedTime, 2000, cuEventElapsedTime)                                                \
    X(cuEventElapsedTime, 12080, cuEventElapsedTime_v2)                                            \
    X(cuEventQuery, 2000, cuEventQuery)                                                            \
    X(cuEventRecord, 2000, cuEventRecord)                                                          \
    X(cuEventRecordWithFlags, 11010, cuEventRecordWithFlags)                                       \
    X(cuEventSynchronize, 2000, cuEventSynchronize)                                                \
    X(cuFuncGetAttribute, 2020, cuFuncGetAttribute)                                                \
    X(cuGraphDestroy, 10000, cuGraphDestroy)                                                       \
    X(cuGetErrorName, 6000, cuGetErrorName)                                                        \
    X(cuGetErrorString, 6000, cuGetErrorString)                                                    \
    X(cuGetExportTable, 3000, cuGetExportTable)                                                    \
    X(cuGetProcAddress, 11030, cuGetProcAddress)                                                   \
    X(cuGetProcAddress, 12000, cuGetProcAddress_v2)                                                \
    X(cuInit, 2000, cuInit)                                                                        \
    X(cuIpcCloseMemHandle, 4010, cuIpcCloseMemHandle)                                              \
    X(cuIpcGetEventHandle, 4010, cuIpcGetEventHandle)                                              \
    X(cuIpcGetMemHandle, 4010, cuIpcGetMemHandle)                                                  \
    X(cuIpcOpenEventHandle, 4010, cuIpcOpenEventHandle)                                            \
    X(cuIpcOpenMemHandle, 4010, cuIpcOpenMemHandle)                                                \
    X(cuIpcOpenMemHandle, 11000, cuIpcOpenMemHandle_v2)                                            \
    X(cuLaunchCooperativeKernel, 9000, cuLaunchCooperativeKernel)                                  \
    X(cuLaunchHostFunc, 10000, cuLaunchHostFunc)                                                   \
    X(cuLaunchKernel, 4000, cuLaunchKernel)                                                        \
    X(cuLaunchKernelEx, 11060, cuLaunchKernelEx)                                                   \
    X(cuMemAddressFree, 10020, cuMemAddressFree)                                                   \
    X(cuMemAddressReserve, 10020, cuMemAddressReserve)                                             \
    X(cuMemAlloc, 2000, cuMemAlloc)                                                                \
    X(cuMemAlloc, 3020, cuMemAlloc_v2)                                                             \
    X(cuMemAllocAsync, 11020, cuMemAllocAsync)                                                     \
    X(cuMemAllocHost, 2000, cuMemAllocHost)                                                        \
    X(cuMemAllocHost, 3020, cuMemAllocHost_v2)                                                     \
    X(cuMemAllocManaged, 6000, cuMemAllocManaged)                                                  \
    X(cuMemAllocPitch, 2000, cuMemAllocPitch)                                                      \
    X(cuMemAllocPitch, 3020, cuMemAllocPitch_v2)                                                   \
    X(cuMemCreate, 10020, cuMemCreate)                                                             \
    X(cuMemExportToShareableHandle, 10020, cuMemExportToShareableHandle)                           \
    X(cuMemFree, 2000, cuMemFree)                                                                  \
    X(cuMemFree, 3020, cuMemFree_v2)                                                               \
    X(cuMemFreeAsync, 11020, cuMemFreeAsync)                                                       \
    X(cuMemFreeHost, 2000, cuMemFreeHost)                                                          \
    X(cuMemGetAddressRange, 2000, cuMemGetAddressRange)                                            \
    X(cuMemGetAddressRange, 3020, cuMemGetAddressRange_v2)                                         \
    X(cuMemGetInfo, 2000, cuMemGetInfo)                                                            \
    X(cuMemGetInfo, 3020, cuMemGetInfo_v2)                                                         \
    X(cuMemHostAlloc, 2020, cuMemHostAlloc)                                                        \
    X(cuMemHostGetDevicePointer, 2020, cuMemHostGetDevicePointer)                                  \
    X(cuMemHostGetDevicePointer, 3020, cuMemHostGetDevicePointer_v2)                               \
    X(cuMemHostGetFlags, 2030, cuMemHostGetFlags)                                                  \
    X(cuMemHostRegister, 4000, cuMemHostRegister)                                                  \
    X(cuMemHostRegister, 6050, cuMemHostRegister_v2)                                               \
    X(cuMemHostUnregister, 4000, cuMemHostUnregister)                                              \
    X(cuMemImportFromShareableHandle, 10020, cuMemImportFromShareableHandle)                       \
    X(cuMemMap, 10020, cuMemMap)                                                                   \
    X(cuMemRelease, 10020, cuMemRelease)                                                           \
    X(cuMemSetAccess, 10020, cuMemSetAccess)                                                       \
    X(cuMemUnmap, 10020, cuMemUnmap)                                                               \
    X(cuMemcpy, 4000, cuMemcpy)                                                                    \
    X(cuMemcpy2D, 2000, cuMemcpy2D)                                                                \
    X(cuMemcpy2D, 3020, cuMemcpy2D_v2)                                                             \
    X(cuMemcpy2DAsync, 2000, cuMemcpy2DAsync)                                                      \
    X(cuMemcpy2DAsync, 3020, cuMemcpy2DAsync_v2)                                                   \
    X(cuMemcpy2DUnaligned, 2000, cuMemcpy2DUnaligned)                                              \
    X(cuMemcpy2DUnaligned, 3020, cuMemcpy2DUnaligned_v2)                                           \
    X(cuMemcpyAsync, 4000, cuMemcpyAsync)                                                          \
    X(cuMemcpyDtoD, 2000, cuMemcpyDtoD)                                                            \
    X(cuMemcpyDtoD, 3020, cuMemcpyDtoD_v2)                                                         \
    X(cuMemcpyDtoDAsync, 3000, cuMemcpyDtoDAsync)                                                  \
    X(cuMemcpyDtoDAsync, 3020, cuMemcpyDtoDAsync_v2)                                               \
    X(cuMemcpyDtoH, 2000, cuMemcpyDtoH)                                                            \
    X(cuMemcpyDtoH, 3020, cuMemcpyDtoH_v2)                                                         \
    X(cuMemcpyDtoHAsync, 2000, cuMemcpyDtoHAsync)                                                  \
    X(cuMemcpyDtoHAsync, 3020, cuMemcpyDtoHAsync_v2)                                               \
    X(cuMemcpyHtoD, 2000, cuMemcpyHtoD)                                                            \
    X(cuMemcpyHtoD, 3020, cuMemcpyHtoD_v2)                                                         \
    X(cuMemcpyHtoDAsync, 2000, cuMemcpyHtoDAsync)                                                  \
    X(cuMemcpyHtoDAsync, 3020, cuMemcpyHtoDAsync_v2)                                               \
    X(cuMemcpyPeer, 4000, cuMemcpyPeer)                                                            \
    X(cuMemcpyPeerAsync, 4000, cuMemcpyPeerAsync)                                                  \
    X(cuMemsetD16, 2000, cuMemsetD16)                                                              \
    X(cuMemsetD16, 3020, cuMemsetD16_v2)                                                           \
    X(cuMemsetD16Async, 3020, cuMemsetD16Async)                                                    \
    X(cuMemsetD2D16, 2000, cuMemsetD2D16)                                                          \
    X(cuMemsetD2D16, 3020, cuMemsetD2D16_v2)                                                       \
    X(cuMemsetD2D32, 2000, cuMemsetD2D32)                                                          \
    X(cuMemsetD2D32, 3020, cuMemsetD2D32_v2)                                                       \
    X(cuMemsetD2D8, 2000, cuMemsetD2D8)                                                            \
    X(cuMemsetD2D8, 3020, cuMemsetD2D8_v2)                                                         \
    X(cuMemsetD32, 2000, cuMemsetD32)                                                              \
    X(cuMemsetD32, 3020, cuMemsetD32_v2)                                                           \
    X(cuMemsetD32Async, 3020, cuMemsetD32Async)                                                    \
    X(cuMemsetD8, 2000, cuMemsetD8)                                                                \
    X(cuMemsetD8, 3020, cuMemsetD8_v2)                                                             \
    X(cuMemsetD8Async, 3020, cuMemsetD8Async)                                                      \
    X(cuModuleGetFunction, 2000, cuModuleGetFunction)                                              \
    X(cuModuleGetGlobal, 2000, cuModuleGetGlobal)                                                  \
    X(cuModuleGetGlobal, 3020, cuModuleGetGlobal_v2)                                               \
    X(cuModuleLoad, 2000, cuModuleLoad)                                                            \
    X(cuModuleLoadData, 2000, cuModuleLoadData)                                                    \
    X(cuModuleLoadDataEx, 2010, cuModuleLoadDataEx)                                                \
    X(cuModuleLoadFatBinary, 2000, cuModuleLoadFatBinary)                                          \
    X(cuModuleUnload, 2000, cuModuleUnload)                                                        \
    X(cuMulticastCreate, 12010, cuMulticastCreate)                                                 \
    X(cuPointerGetAttribute, 4000, cuPointerGetAttribute)                                          \
    X(cuPointerGetAttributes, 7000, cuPointerGetAttributes)                                        \
    X(cuStreamAddCallback, 5000, cuStreamAddCallback)                                              \
    X(cuStreamBeginCapture, 10000, cuStreamBeginCapture)                                           \
    X(cuStreamBeginCapture, 10010, cuStreamBeginCapture_v2)                                        \
    X(cuStreamCreate, 2000, cuStreamCreate)                                                        \
    X(cuStreamCreateWithPriority, 5050, cuStreamCreateWithPriority)                                \
    X(cuStreamDestroy, 2000, cuStreamDestroy)                                                      \
    X(cuStreamDestroy, 4000, cuStreamDestroy_v2)                                                   \
    X(cuStreamEndCapture, 10000, cuStreamEndCapture)                                               \
    X(cuStreamGetCtx, 9020, cuStreamGetCtx)                                                        \
    X(cuStreamGetCtx, 12050, cuStreamGetCtx_v2)                                                    \
    X(cuStreamGetDevice, 12080, cuStreamGetDevice)                                                 \
    X(cuStreamGetFlags, 5050, cuStreamGetFlags)                                                    \
    X(cuStreamGetId, 12000, cuStreamGetId)                                                         \
    X(cuStreamGetPriority, 5050, cuStreamGetPriority)                                              \
    X(cuStreamIsCapturing, 10000, cuStreamIsCapturing)                                             \
    X(cuStreamQuery, 2000, cuStreamQuery)                                                          \
    X(cuStreamSynchronize, 2000, cuStreamSynchronize)                                              \
    X(cuStreamWaitEvent, 3020, cuStreamWaitEvent)

// Only their addresses are taken here; what they take is stated where they are defined.
#define DECLARE(name, since, function) extern "C" int function();
GPUSTASIS_ENTRY_POINTS(DECLARE)
#undef DECLARE

namespace gpustasis::emulator {
namespace {

struct EntryPoint {
    const char* name;
    int since;
    int (*function)();
};

#define ENTRY(name, since, function) {#name, since, function},
constexpr EntryPoint kEntryPoints[] = {GPUSTASIS_ENTRY_POINTS(ENTRY)};
#undef ENTRY

} // namespace

QueryResult find_entry_point(const char* name, int version, int driver_version, void** function) {
    *function = nullptr;
    QueryResult found = QueryResult::symbol_not_found;
    for (const EntryPoint& entry : kEntryPoints) { // ascending versions of each name
        if (std::strcmp(entry.name, name) != 0 || entry.since > driver_version) {
            continue;
        }
        if (entry.since <= version) {
            *function = reinterpret_cast<void*>(entry.function);
            found = QueryResult::success;
        } else if (found == QueryResult::symbol_not_found) {
            found = QueryResult::version_not_sufficient;
        }
    }
    return found;
}

} // namespace gpustasis::emulator
