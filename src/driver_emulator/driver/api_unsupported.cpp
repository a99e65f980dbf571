// SPDX-License-Identifier: Apache-2.0
// Entry points that exist and do nothing: what the emulator cannot do, and the oldest ABI.
#include "driver_emulator/driver/api.hpp"
#include "driver_emulator/driver/driver.hpp"

using namespace gpustasis::emulator;

#define UNSUPPORTED(name)                                                                          \
    GPUSTASIS_API(name)(...) {                                                                     \
        return call([](Driver&) { return Result::not_supported; });                                \
    }

UNSUPPORTED(cuMemAllocManaged)
UNSUPPORTED(cuMemAllocAsync)
UNSUPPORTED(cuMemFreeAsync)
UNSUPPORTED(cuMemCreate)
UNSUPPORTED(cuMemRelease)
UNSUPPORTED(cuMemMap)
UNSUPPORTED(cuMemUnmap)
UNSUPPORTED(cuMemSetAccess)
UNSUPPORTED(cuMemAddressReserve)
UNSUPPORTED(cuMemAddressFree)
UNSUPPORTED(cuMemExportToShareableHandle)
UNSUPPORTED(cuMemImportFromShareableHandle)
UNSUPPORTED(cuMulticastCreate)
UNSUPPORTED(cuIpcGetMemHandle)
UNSUPPORTED(cuIpcOpenMemHandle_v2)
UNSUPPORTED(cuIpcCloseMemHandle)
UNSUPPORTED(cuIpcGetEventHandle)
UNSUPPORTED(cuIpcOpenEventHandle)
UNSUPPORTED(cuLaunchCooperativeKernel)

// A program that finds these names by dlsym, instead of the _v2 ones that cuda.h means, gets the
// ABI of CUDA 2: contexts of a kind that nobody has made.
#define LEGACY(name)                                                                               \
    GPUSTASIS_API(name)(...) {                                                                     \
        return call([](Driver&) { return Result::invalid_context; });                              \
    }

LEGACY(cuDeviceTotalMem)
LEGACY(cuDevicePrimaryCtxRelease)
LEGACY(cuDevicePrimaryCtxReset)
LEGACY(cuDevicePrimaryCtxSetFlags)
LEGACY(cuCtxCreate)
LEGACY(cuCtxDestroy)
LEGACY(cuCtxPushCurrent)
LEGACY(cuCtxPopCurrent)
LEGACY(cuModuleGetGlobal)
LEGACY(cuMemGetInfo)
LEGACY(cuMemAlloc)
LEGACY(cuMemAllocPitch)
LEGACY(cuMemFree)
LEGACY(cuMemGetAddressRange)
LEGACY(cuMemAllocHost)
LEGACY(cuMemHostRegister)
LEGACY(cuMemHostGetDevicePointer)
LEGACY(cuMemcpyHtoD)
LEGACY(cuMemcpyDtoH)
LEGACY(cuMemcpyDtoD)
LEGACY(cuMemcpyHtoDAsync)
LEGACY(cuMemcpyDtoHAsync)
LEGACY(cuMemcpyDtoDAsync)
LEGACY(cuMemcpy2D)
LEGACY(cuMemcpy2DUnaligned)
LEGACY(cuMemcpy2DAsync)
LEGACY(cuMemsetD8)
LEGACY(cuMemsetD16)
LEGACY(cuMemsetD32)
LEGACY(cuMemsetD2D8)
LEGACY(cuMemsetD2D16)
LEGACY(cuMemsetD2D32)
LEGACY(cuStreamDestroy)
LEGACY(cuEventDestroy)
LEGACY(cuIpcOpenMemHandle)
LEGACY(cuStreamBeginCapture)
