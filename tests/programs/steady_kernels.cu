// SPDX-License-Identifier: Apache-2.0
/* The kernel of steady_job: a stretch of numbers, each of them moved on by `rounds` steps of xorshift64
 * (Marsaglia, 2003). Zero stays zero. */
#include "gpustasis_emulator.h"

GPUSTASIS_KERNEL(advance, unsigned long long *numbers, unsigned int count, unsigned int rounds) {
    const unsigned int index = blockIdx.x * blockDim.x + threadIdx.x;
    if (index >= count)
        return;
    unsigned long long number = numbers[index];
    for (unsigned int round = 0; round < rounds; ++round) {
        number ^= number << 13;
        number ^= number >> 7;
        number ^= number << 17;
    }
    numbers[index] = number;
}
