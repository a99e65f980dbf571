// SPDX-License-Identifier: Apache-2.0
#include "cuda_driver.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

struct cuda_driver cuda;

#define SPELLED(name) #name
#define SPELLED_AS_CUDA_H(name) SPELLED(name)

static void resolve(void* library, const char* symbol, void* member) {
    void* found = dlsym(library, symbol);
    if (!found) {
        fprintf(stderr, "train: libcuda.so.1 has no %s\n", symbol);
        exit(3);
    }
    memcpy(member, &found,
           sizeof found); /* ISO C has no cast from an object to a function pointer */
}

void load_cuda_driver(void) {
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!library) {
        fprintf(stderr, "train: no CUDA driver: %s\n", dlerror());
        exit(3);
    }
#define DEMO_CUDA_RESOLVE(name) resolve(library, SPELLED_AS_CUDA_H(name), &cuda.name);
    DEMO_CUDA_FUNCTIONS(DEMO_CUDA_RESOLVE)
#undef DEMO_CUDA_RESOLVE
}

void check_cuda(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS)
        return;
    const char* name = NULL;
    if (cuda.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        name = "unknown error";
    fprintf(stderr, "train: %s: %s (%d)\n", call, name, (int)result);
    exit(4);
}
