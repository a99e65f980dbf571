// SPDX-License-Identifier: Apache-2.0
/* A CUDA process forks; neither call cuInit again. The child prints what the driver tells it, then
 * both wait for their end.
 *
 *     fork_child      prints "child PID CUINIT CUDEVICEGETCOUNT CUMEMALLOC", the CUresults, and "ready",
 *                     in either order
 */
#include "check.h"

#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

int main(void) {
    CUcontext context;
    CUdeviceptr memory;
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&memory, 1 << 20));
    const pid_t child = fork();
    if (child == 0) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        int count = 0;
        const int init = (int)cuInit(0);
        const int get_count = (int)cuDeviceGetCount(&count);
        const int alloc = (int)cuMemAlloc(&memory, 1 << 20);
        printf("child %d %d %d %d\n", (int)getpid(), init, get_count, alloc);
        fflush(stdout);
        pause();
    }
    OK(cuMemFree(memory)); /* the parent goes on */
    printf("ready\n");
    fflush(stdout);
    pause();
    return 0;
}
