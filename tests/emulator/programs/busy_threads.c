// SPDX-License-Identifier: Apache-2.0
/* Threads that take the C library's locks all the time, while one uses a GPU.
 *
 *     busy_threads THREADS
 *
 * At any instant some thread holds malloc's lock, stdio's, or is inside the driver. Prints "round N"
 * after each round of the GPU thread, whose memory it checks; "WRONG" if it is not as written.
 */
#include "check.h"

#include <pthread.h>
#include <string.h>
#include <unistd.h>

static FILE* sink;

static void* allocate_and_print(void* argument) {
    const unsigned seed = (unsigned)(size_t)argument;
    for (unsigned i = seed;; i = i * 1103515245u + 12345u) {
        char* bytes = malloc(i % 200000 + 1);
        bytes[0] = 1;
        fprintf(sink, "%u", i);
        free(bytes);
    }
    return NULL;
}

int main(int argc, char** argv) {
    enum { kSize = 5 << 20 };
    TRUE(argc == 2);
    CUcontext context;
    CUdeviceptr memory;
    unsigned char* bytes = malloc(kSize);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&memory, kSize));
    sink = fopen("/dev/null", "w");
    for (int i = 0; i < atoi(argv[1]); ++i) {
        pthread_t thread;
        TRUE(pthread_create(&thread, NULL, allocate_and_print, (void*)(size_t)i) == 0);
    }
    for (unsigned round = 0;; ++round) {
        CUdeviceptr more;
        OK(cuMemAlloc(&more, 1000));
        OK(cuMemsetD8(memory, (unsigned char)round, kSize));
        memset(bytes, (int)~round, kSize);
        OK(cuMemcpyDtoH(bytes, memory, kSize));
        for (int i = 0; i < kSize; ++i) {
            if (bytes[i] != (unsigned char)round) {
                printf("WRONG in round %u at %d\n", round, i);
                return 1;
            }
        }
        OK(cuMemFree(more));
        printf("round %u\n", round);
        fflush(stdout);
    }
}
