// SPDX-License-Identifier: Apache-2.0
/* A plain CUDA driver API program: it includes cuda.h and nothing of this project.
 *
 * Usage: plain_vectors MEGABYTES ROUNDS PAUSE_MS
 * Fills two vectors on the GPU, one from the host and one by memset, then in each round copies them
 * back and forth, changes one word, and checks every byte. Prints "round N ok" after each round and
 * "done" at the end; on any difference it says where, and exits with 1. SIGUSR1 ends a pause.
 */
#include <cuda.h>

#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static void check(CUresult result, const char* call) {
    if (result != CUDA_SUCCESS) {
        const char* text = NULL;
        cuGetErrorString(result, &text);
        fprintf(stderr, "%s: %d (%s)\n", call, (int)result, text ? text : "?");
        exit(1);
    }
}
#define CHECK(call) check(call, #call)

static uint32_t pattern(size_t i, uint32_t seed) {
    uint32_t x = (uint32_t)i * 2654435761u + seed;
    x ^= x >> 15;
    return x * 2246822519u;
}

int main(int argc, char** argv) {
    if (argc != 4) {
        fprintf(stderr, "usage: %s MEGABYTES ROUNDS PAUSE_MS\n", argv[0]);
        return 2;
    }
    const size_t size = (size_t)atol(argv[1]) << 20;
    const long rounds = atol(argv[2]);
    const long pause_ms = atol(argv[3]);
    const size_t words = size / sizeof(uint32_t);
    sigset_t wake;
    sigemptyset(&wake);
    sigaddset(&wake, SIGUSR1);
    sigprocmask(SIG_BLOCK, &wake, NULL);

    CHECK(cuInit(0));
    CUdevice device;
    CHECK(cuDeviceGet(&device, 0));
    CUcontext context;
    CHECK(cuDevicePrimaryCtxRetain(&context, device));
    CHECK(cuCtxSetCurrent(context));

    CUdeviceptr random = 0;
    CUdeviceptr constant = 0;
    CHECK(cuMemAlloc(&random, size));
    CHECK(cuMemAlloc(&constant, size));
    uint32_t* expected = malloc(size);
    uint32_t* got = malloc(size);
    if (!expected || !got) {
        return 1;
    }
    for (size_t i = 0; i < words; ++i) {
        expected[i] = pattern(i, 1);
    }
    CHECK(cuMemcpyHtoD(random, expected, size));
    CHECK(cuMemsetD32(constant, 0x5a5a5a5a, words));
    printf("pid ready at %p\n", (void*)(uintptr_t)random);
    fflush(stdout);

    for (long round = 0; round < rounds; ++round) {
        const size_t changed = ((size_t)round * 7919u) % words;
        expected[changed] = (uint32_t)round;
        CHECK(cuMemcpyHtoD(random + changed * sizeof(uint32_t), &expected[changed],
                           sizeof(uint32_t)));
        CHECK(cuMemcpyDtoH(got, random, size));
        for (size_t i = 0; i < words; ++i) {
            if (got[i] != expected[i]) {
                fprintf(stderr, "round %ld: random[%zu] is %08x, not %08x\n", round, i, got[i],
                        expected[i]);
                return 1;
            }
        }
        CHECK(cuMemcpyDtoH(got, constant, size));
        for (size_t i = 0; i < words; ++i) {
            if (got[i] != 0x5a5a5a5a) {
                fprintf(stderr, "round %ld: constant[%zu] is %08x\n", round, i, got[i]);
                return 1;
            }
        }
        printf("round %ld ok\n", round);
        fflush(stdout);
        struct timespec pause = {pause_ms / 1000, (pause_ms % 1000) * 1000000};
        while (sigtimedwait(&wake, NULL, &pause) < 0 && errno == EINTR) // by no signal
            continue;
    }
    CHECK(cuMemFree(random));
    CHECK(cuMemFree(constant));
    CHECK(cuDevicePrimaryCtxRelease(device));
    printf("done\n");
    free(expected);
    free(got);
    return 0;
}
