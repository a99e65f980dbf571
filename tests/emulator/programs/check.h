// SPDX-License-Identifier: Apache-2.0
/* What the test programs have in common. */
#ifndef CHECK_H
#define CHECK_H

#include <cuda.h>
#include <stdio.h>
#include <stdlib.h>

/* Ends the program unless `call` gives `wanted`. */
#define EXPECT(wanted, call)                                                                       \
    do {                                                                                           \
        const int result_ = (int)(call);                                                           \
        if (result_ != (int)(wanted)) {                                                            \
            printf("line %d: %s is %d, not %d\n", __LINE__, #call, result_, (int)(wanted));        \
            exit(1);                                                                               \
        }                                                                                          \
    } while (0)
#define OK(call) EXPECT(CUDA_SUCCESS, call)
#define TRUE(condition) EXPECT(1, !!(condition))

#endif
