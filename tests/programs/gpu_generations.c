// SPDX-License-Identifier: Apache-2.0
/* Holds GPU memory whose every byte follows from a seed and a generation, and checks it on demand.
 *
 *     gpu_generations [MIB [SEED [ZERO_MIB]]]
 *
 * Fills MIB of device memory (default 8) on GPU 0, leaves ZERO_MIB more (default 4) zero, and prints
 * "ready". At each SIGUSR1 it reads all of it back, compares every byte, prints "intact GENERATION"
 * and writes the next generation. A byte that is wrong is "WRONG at OFFSET" and exit status 1; an
 * error of the driver is its name and exit status 2. SIGTERM: prints "done", exit status 0.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void require(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS)
        return;
    const char* name = "an unknown error";
    cuGetErrorName(result, &name);
    printf("%s: %s\n", call, name);
    exit(2);
}
#define REQUIRE(call) require((call), #call)

/* A third of the chunks compresses, a third does not, a third repeats another's bytes. */
static void fill(uint8_t* bytes, size_t size, uint64_t seed, uint64_t generation) {
    enum { kStretch = 1 << 18 };
    for (size_t begin = 0; begin < size; begin += kStretch) {
        const size_t end = begin + kStretch < size ? begin + kStretch : size;
        const unsigned kind = (unsigned)(begin / kStretch % 3);
        uint64_t state = seed * 0x9e3779b97f4a7c15u + generation + (kind == 2 ? 0 : begin) + 1;
        for (size_t i = begin; i < end; ++i) {
            if (kind == 1) {
                bytes[i] = (uint8_t)((i >> 8) + generation + seed);
                continue;
            }
            state ^= state << 13, state ^= state >> 7, state ^= state << 17;
            bytes[i] = (uint8_t)(state >> 32);
        }
    }
}

static void compare(const uint8_t* found, const uint8_t* wanted, size_t size) {
    for (size_t i = 0; i < size; ++i) {
        if (found[i] != wanted[i]) {
            printf("WRONG at %zu\n", i);
            exit(1);
        }
    }
}

int main(int argc, char** argv) {
    const size_t size = (size_t)(argc > 1 ? atol(argv[1]) : 8) << 20;
    const uint64_t seed = argc > 2 ? strtoull(argv[2], NULL, 10) : 1;
    const size_t zero_size = (size_t)(argc > 3 ? atol(argv[3]) : 4) << 20;
    setvbuf(stdout, NULL, _IOLBF, 0);

    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigaddset(&signals, SIGTERM);
    sigprocmask(SIG_BLOCK, &signals, NULL);

    CUdevice device;
    CUcontext context;
    CUdeviceptr memory = 0, zeros = 0;
    REQUIRE(cuInit(0));
    REQUIRE(cuDeviceGet(&device, 0));
    REQUIRE(cuDevicePrimaryCtxRetain(&context, device));
    REQUIRE(cuCtxSetCurrent(context));
    uint8_t* wanted = malloc(size);
    uint8_t* found = malloc(size > zero_size ? size : zero_size);
    uint8_t* nothing = calloc(zero_size + 1, 1);
    if (wanted == NULL || found == NULL || nothing == NULL)
        return 2;
    REQUIRE(cuMemAlloc(&memory, size));
    if (zero_size > 0) {
        REQUIRE(cuMemAlloc(&zeros, zero_size));
        REQUIRE(cuMemsetD8(zeros, 0, zero_size));
    }
    uint64_t generation = 0;
    fill(wanted, size, seed, generation);
    REQUIRE(cuMemcpyHtoD(memory, wanted, size));
    printf("ready\n");

    for (;;) {
        int signal = 0;
        sigwait(&signals, &signal);
        if (signal == SIGTERM)
            break;
        memset(found, 0xff, size);
        REQUIRE(cuMemcpyDtoH(found, memory, size));
        compare(found, wanted, size);
        if (zero_size > 0) {
            memset(found, 0xff, zero_size);
            REQUIRE(cuMemcpyDtoH(found, zeros, zero_size));
            compare(found, nothing, zero_size);
        }
        printf("intact %llu\n", (unsigned long long)generation);
        fill(wanted, size, seed, ++generation);
        REQUIRE(cuMemcpyHtoD(memory, wanted, size));
    }
    printf("done\n");
    return 0;
}
