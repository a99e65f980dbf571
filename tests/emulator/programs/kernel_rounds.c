// SPDX-License-Identifier: Apache-2.0
/* Launches kernels in two streams, for ever, and checks what they did.
 *
 *     kernel_rounds MODULE [ROUNDS]
 *
 * MODULE is loaded twice, from its path and from memory (the program then forgets that memory).
 * Prints "round N ok" and, after ROUNDS, "done".
 */
#include "check.h"

#include <string.h>
#include <unistd.h>

enum { kCount = 1 << 20 };

static void* read_file(const char* path) {
    FILE* file = fopen(path, "rb");
    TRUE(file);
    TRUE(fseek(file, 0, SEEK_END) == 0);
    const long size = ftell(file);
    rewind(file);
    void* bytes = malloc((size_t)size);
    TRUE(bytes && fread(bytes, 1, (size_t)size, file) == (size_t)size);
    fclose(file);
    return bytes;
}

static void launch_scale(CUfunction scale, CUstream stream, CUdeviceptr x, unsigned factor) {
    unsigned count = kCount;
    void* params[] = {&x, &factor, &count};
    OK(cuLaunchKernel(scale, (kCount + 255) / 256, 1, 1, 256, 1, 1, 0, stream, params, NULL));
}

int main(int argc, char** argv) {
    TRUE(argc > 1);
    const long rounds = argc > 2 ? atol(argv[2]) : 1000000000;
    CUcontext context;
    CUmodule from_path, from_memory;
    CUfunction scale, also_scale;
    CUstream streams[2];
    CUdeviceptr x[2];
    CUevent start, end;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoad(&from_path, argv[1]));
    void* image = read_file(argv[1]);
    OK(cuModuleLoadData(&from_memory, image));
    free(image);
    OK(cuModuleGetFunction(&scale, from_path, "scale"));
    OK(cuModuleGetFunction(&also_scale, from_memory, "scale"));
    OK(cuEventCreate(&start, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&end, CU_EVENT_DEFAULT));
    unsigned* expected = calloc(2 * kCount, sizeof *expected);
    unsigned* found;
    OK(cuMemHostAlloc((void**)&found, kCount * sizeof *found, 0));
    for (int s = 0; s < 2; ++s) {
        OK(cuStreamCreate(&streams[s], CU_STREAM_NON_BLOCKING));
        OK(cuMemAlloc(&x[s], kCount * sizeof(unsigned)));
        OK(cuMemsetD32(x[s], 0, kCount));
    }
    for (long round = 0; round < rounds; ++round) {
        OK(cuEventRecord(start, streams[0]));
        for (unsigned repeat = 0; repeat < 3; ++repeat) {
            launch_scale(scale, streams[0], x[0], 3 + repeat);
            launch_scale(also_scale, streams[1], x[1], 5 + repeat);
        }
        OK(cuEventRecord(end, streams[0]));
        OK(cuStreamWaitEvent(streams[1], end, 0));
        for (int s = 0; s < 2; ++s) {
            unsigned* wanted = expected + s * kCount;
            for (unsigned repeat = 0; repeat < 3; ++repeat)
                for (unsigned i = 0; i < kCount; ++i)
                    wanted[i] = wanted[i] * ((s ? 5 : 3) + repeat) + i;
            OK(cuMemcpyDtoHAsync(found, x[s], kCount * sizeof *found, streams[s]));
            OK(cuStreamSynchronize(streams[s]));
            TRUE(memcmp(found, wanted, kCount * sizeof *found) == 0);
        }
        float ms = -1;
        OK(cuEventSynchronize(end));
        OK(cuEventElapsedTime(&ms, start, end));
        TRUE(ms > 0 && ms < 60000);
        printf("round %ld ok\n", round);
        fflush(stdout);
        usleep(10000);
    }
    printf("done\n");
    return 0;
}
