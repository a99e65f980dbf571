// SPDX-License-Identifier: Apache-2.0
/* Launches one kernel of a module without waiting for it.
 *
 *     launch_one MODULE KERNEL NUMBER     NUMBER is its parameter, 64 bits wide
 *
 * Prints "launched", then waits for it and prints "then CODE" twice, then sleeps.
 */
#include "check.h"

#include <unistd.h>

int main(int argc, char** argv) {
    TRUE(argc == 4);
    CUcontext context;
    CUmodule module;
    CUfunction function;
    unsigned long long number = strtoull(argv[3], NULL, 0);
    void* params[] = {&number};
    setvbuf(stdout, NULL, _IOLBF, 0);
    OK(cuInit(0));
    OK(cuDevicePrimaryCtxRetain(&context, 0));
    OK(cuCtxSetCurrent(context));
    OK(cuModuleLoad(&module, argv[1]));
    OK(cuModuleGetFunction(&function, module, argv[2]));
    OK(cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, params, NULL));
    printf("launched\n");
    for (int i = 0; i < 2; ++i)
        printf("then %d\n", (int)cuCtxSynchronize());
    pause();
    return 0;
}
