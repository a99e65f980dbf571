// SPDX-License-Identifier: Apache-2.0
/* A CUDA process and children of it that have inherited the driver's device files.
 *
 *     heirs WORD...
 *
 * WORD, for each child: "fork": it keeps all; "close": it closes all descriptors but the first three, the
 * mappings stay; "grandchild": it forks one that keeps all, and both go on; "own=PATH": it keeps all, and
 * opens PATH as well; "load=PATH": it keeps all, and loads the library PATH; "open=PATH": it executes a
 * program that has PATH open, which it has not inherited. "rank=PATH": it executes this program anew, as another
 * CUDA process, with the word "self=PATH". "keep=PATH" and "self=PATH" are no children: the CUDA process opens the file, or
 * loads the library, PATH itself, behind the children of the words before. All print "PID step K ok" twenty times a second. The CUDA process
 * compares all of its GPU memory at each step, and calls of a forked child must end with
 * CUDA_ERROR_NOT_INITIALIZED. What is wrong ends the process with status 1.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { kBytes = 4 << 20, kStepMicroseconds = 50000 };

static void require(int holds, const char* what) {
    if (holds)
        return;
    printf("%d WRONG: %s\n", (int)getpid(), what);
    exit(1);
}
#define OK(call) require((call) == CUDA_SUCCESS, #call)

static void step(unsigned long number) {
    printf("%d step %lu ok\n", (int)getpid(), number);
    usleep(kStepMicroseconds);
}

static void run_child(const char* word) {
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (!strncmp(word, "open=", 5)) {
        execl("/proc/self/exe", "heirs", word, "stranger", (char*)NULL);
        require(0, "cannot execute itself");
    }
    if (!strncmp(word, "rank=", 5)) {
        char self[4096];
        require(snprintf(self, sizeof self, "self=%s", word + 5) < (int)sizeof self, word);
        execl("/proc/self/exe", "heirs", self, (char*)NULL);
        require(0, "cannot execute itself");
    }
    if (!strncmp(word, "own=", 4))
        require(open(word + 4, O_RDWR) >= 0, word);
    if (!strncmp(word, "load=", 5))
        require(dlopen(word + 5, RTLD_NOW) != NULL, word);
    if (!strcmp(word, "close"))
        for (int fd = 3; fd < 1024; ++fd)
            close(fd);
    if (!strcmp(word, "grandchild") && fork() == 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    for (unsigned long number = 0;; ++number) {
        int count = 0;
        require(cuDeviceGetCount(&count) == CUDA_ERROR_NOT_INITIALIZED, "a child can use CUDA");
        step(number);
    }
}

int main(int argc, char** argv) {
    setvbuf(stdout, NULL, _IOLBF, 0);
    if (argc == 3 && !strcmp(argv[2], "stranger")) {
        require(open(argv[1] + 5, O_RDWR) >= 0, argv[1]);
        for (unsigned long number = 0;; ++number)
            step(number);
    }
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory;
    OK(cuInit(0));
    OK(cuDeviceGet(&device, 0));
    OK(cuDevicePrimaryCtxRetain(&context, device));
    OK(cuCtxSetCurrent(context));
    OK(cuMemAlloc(&memory, kBytes));
    uint8_t *wanted = malloc(kBytes), *found = malloc(kBytes);
    require(wanted && found, "no memory");
    for (int i = 0; i < kBytes; ++i)
        wanted[i] = (uint8_t)(i * 2654435761u >> 13);
    OK(cuMemcpyHtoD(memory, wanted, kBytes));
    for (int i = 1; i < argc; ++i) {
        if (!strncmp(argv[i], "keep=", 5))
            require(open(argv[i] + 5, O_RDWR) >= 0, argv[i]);
        else if (!strncmp(argv[i], "self=", 5))
            require(dlopen(argv[i] + 5, RTLD_NOW) != NULL, argv[i]);
        else if (fork() == 0)
            run_child(argv[i]);
    }
    for (unsigned long number = 0;; ++number) {
        memset(found, 0, kBytes);
        OK(cuMemcpyDtoH(found, memory, kBytes));
        require(!memcmp(found, wanted, kBytes), "GPU memory");
        step(number);
    }
}
