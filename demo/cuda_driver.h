// SPDX-License-Identifier: Apache-2.0
/* The CUDA driver API, bound at run time: the program needs cuda.h to build and no libcuda to link.
 *
 * Each member of `cuda` has the name and the type that cuda.h declares; a versioned name
 * (cuMemAlloc -> cuMemAlloc_v2) is resolved as the header spells it. */
#ifndef GPUSTASIS_DEMO_CUDA_DRIVER_H
#define GPUSTASIS_DEMO_CUDA_DRIVER_H

#include <cuda.h>

/* A list like this comes out differently each time it is formatted. */
/* clang-format off */
#define DEMO_CUDA_FUNCTIONS(X)                                                                     \
    X(cuInit) X(cuDriverGetVersion) X(cuGetErrorName) X(cuDeviceGet) X(cuDeviceGetName)            \
    X(cuDevicePrimaryCtxRetain) X(cuDevicePrimaryCtxRelease) X(cuCtxSetCurrent)                    \
    X(cuMemAlloc) X(cuMemFree) X(cuMemHostAlloc) X(cuMemFreeHost) X(cuMemsetD8)                    \
    X(cuMemcpyHtoDAsync) X(cuMemcpyDtoHAsync) X(cuStreamCreate) X(cuStreamDestroy)                 \
    X(cuStreamSynchronize) X(cuEventCreate) X(cuEventDestroy) X(cuEventRecord)                     \
    X(cuEventSynchronize) X(cuModuleLoad) X(cuModuleGetFunction) X(cuModuleUnload)                 \
    X(cuLaunchKernel)
/* clang-format on */

struct cuda_driver {
#define DEMO_CUDA_MEMBER(name) __typeof__(&name) name;
    DEMO_CUDA_FUNCTIONS(DEMO_CUDA_MEMBER)
#undef DEMO_CUDA_MEMBER
};

extern struct cuda_driver cuda;

/* Load libcuda.so.1 and resolve every function above. Prints what is missing and exits with 3. */
void load_cuda_driver(void);

/* Print the failed call with the driver's name for `result`, and exit with 4. */
void check_cuda(CUresult result, const char* call);

/* Call a driver function that must succeed. */
#define CUDA(function, ...) check_cuda(cuda.function(__VA_ARGS__), #function)

#endif
