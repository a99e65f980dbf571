// SPDX-License-Identifier: Apache-2.0
/* gpu-check's long kernel for the driver emulator. On a GPU gpu-check has PTX of its own for it, which
 * reads the GPU's clock; here nothing is to be computed, and a processor that waits is no loss. */
#include "gpustasis_emulator.h"

#include <time.h>

GPUSTASIS_KERNEL(spin, unsigned long long nanoseconds) {
    const timespec time{static_cast<time_t>(nanoseconds / 1000000000),
                        static_cast<long>(nanoseconds % 1000000000)};
    nanosleep(&time, nullptr);
}
