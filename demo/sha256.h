// SPDX-License-Identifier: Apache-2.0
/* SHA-256 (FIPS 180-4), so that a run can name its weights in one line. */
#ifndef GPUSTASIS_DEMO_SHA256_H
#define GPUSTASIS_DEMO_SHA256_H

#include <stddef.h>
#include <stdint.h>

struct sha256 {
    uint32_t state[8];
    uint8_t block[64];
    uint64_t size; /* bytes taken so far */
};

void sha256_start(struct sha256* hash);
void sha256_add(struct sha256* hash, const void* bytes, size_t size);

/* Write the digest as 64 hexadecimal digits and a terminating zero. `hash` is used up. */
void sha256_finish(struct sha256* hash, char hex[65]);

#endif
