// SPDX-License-Identifier: Apache-2.0
/* A process checkpoints and restores itself, before it has a context and after. Prints "done". */
#include "check.h"

#include <string.h>
#include <unistd.h>

static void cycle(void) {
    CUprocessState state;
    OK(cuCheckpointProcessLock(getpid(), NULL));
    OK(cuCheckpointProcessCheckpoint(getpid(), NULL));
    OK(cuCheckpointProcessGetState(getpid(), &state));
    EXPECT(CU_PROCESS_STATE_CHECKPOINTED, state);
    OK(cuCheckpointProcessRestore(getpid(), NULL));
    OK(cuCheckpointProcessUnlock(getpid(), NULL));
}

int main(void) {
    enum { kSize = 3 << 20 };
    CUcontext context;
    CUdeviceptr memory;
    unsigned char* bytes = malloc(kSize);
    OK(cuInit(0));
    cycle();
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    cycle();
    OK(cuMemAlloc(&memory, kSize));
    OK(cuMemsetD8(memory, 0x77, kSize));
    cycle();
    OK(cuMemcpyDtoH(bytes, memory, kSize));
    for (int i = 0; i < kSize; ++i)
        TRUE(bytes[i] == 0x77);
    OK(cuMemFree(memory));
    cycle();
    printf("done\n");
    return 0;
}
