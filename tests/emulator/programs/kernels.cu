// SPDX-License-Identifier: Apache-2.0
/* Kernels for the tests of the emulator, in the form that nvcc would take as well. */
#include "gpustasis_emulator.h"

#include <signal.h>
#include <time.h>

/* x = x * factor + index, in integers */
GPUSTASIS_KERNEL(scale, unsigned* x, unsigned factor, unsigned count) {
    const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) {
        x[i] = x[i] * factor + i;
    }
}

/* Where each thread was: one word per thread of a 3-d grid, in order. */
GPUSTASIS_KERNEL(where, unsigned long long* out) {
    const unsigned long long block =
        (blockIdx.z * gridDim.y + blockIdx.y) * gridDim.x + blockIdx.x;
    const unsigned long long thread =
        (threadIdx.z * blockDim.y + threadIdx.y) * blockDim.x + threadIdx.x;
    const unsigned long long size = blockDim.x * blockDim.y * blockDim.z;
    atomicAdd(&out[block * size + thread], block * 1000 + thread + 1);
}

struct Odd {
    char letter;
    double number;
};

/* Parameters of every alignment. */
GPUSTASIS_KERNEL(gather, double* out, char a, short b, int c, Odd d, char e, double f) {
    *out = a + b * 10 + c * 100 + d.letter * 1000 + d.number + e * 10000 + f;
}

GPUSTASIS_KERNEL(sleep_ms, unsigned milliseconds) {
    const timespec time{static_cast<time_t>(milliseconds / 1000),
                        static_cast<long>(milliseconds % 1000) * 1000000};
    nanosleep(&time, nullptr);
}

/* Until there is no such process, not even as a zombie. */
GPUSTASIS_KERNEL(while_there_is, int pid) {
    const timespec time{0, 10000000};
    while (kill(pid, 0) == 0) {
        nanosleep(&time, nullptr);
    }
}

GPUSTASIS_KERNEL(crash, unsigned* address) {
    *address = 1;
}
