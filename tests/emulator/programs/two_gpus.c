// SPDX-License-Identifier: Apache-2.0
/* Holds 8 MiB on GPU 0 and 16 MiB on GPU 1.
 *
 * Prints "GPUs UUID0 UUID1 ready". At each SIGUSR1 it checks both and prints "GPUs UUID0 UUID1 intact".
 */
#include "check.h"

#include <signal.h>
#include <unistd.h>

enum { kGpus = 2, kBase = 8 << 20 };

static void tell(const char* word) {
    printf("GPUs");
    for (int gpu = 0; gpu < kGpus; ++gpu) {
        CUuuid uuid;
        OK(cuDeviceGetUuid(&uuid, gpu));
        printf(" ");
        for (int i = 0; i < 16; ++i)
            printf("%02x", (unsigned char)uuid.bytes[i]);
    }
    printf(" %s\n", word);
    fflush(stdout);
}

int main(void) {
    CUcontext contexts[kGpus];
    CUdeviceptr memory[kGpus];
    sigset_t wake;
    sigemptyset(&wake);
    sigaddset(&wake, SIGUSR1);
    sigprocmask(SIG_BLOCK, &wake, NULL);
    OK(cuInit(0));
    for (int gpu = 0; gpu < kGpus; ++gpu) {
        OK(cuDevicePrimaryCtxRetain(&contexts[gpu], gpu));
        OK(cuCtxSetCurrent(contexts[gpu]));
        OK(cuMemAlloc(&memory[gpu], (size_t)kBase << gpu));
        OK(cuMemsetD32(memory[gpu], 0xabcd0000u + (unsigned)gpu, ((size_t)kBase << gpu) / 4));
    }
    tell("ready");
    for (int number; sigwait(&wake, &number) == 0;) {
        for (int gpu = 0; gpu < kGpus; ++gpu) {
            const size_t size = (size_t)kBase << gpu;
            unsigned* words = malloc(size);
            OK(cuCtxSetCurrent(contexts[gpu]));
            OK(cuMemcpyDtoH(words, memory[gpu], size));
            for (size_t i = 0; i < size / 4; ++i)
                TRUE(words[i] == 0xabcd0000u + (unsigned)gpu);
            free(words);
        }
        tell("intact");
    }
    return 1;
}
