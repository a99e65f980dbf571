// SPDX-License-Identifier: Apache-2.0
/* What steady_job.c has in memory, and what its processes share. */
#pragma once
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static uint64_t next_random(uint64_t* state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

static void fill(uint8_t* bytes, size_t size, int region, uint64_t seed) {
    for (size_t i = 0; i < size; ++i) {
        switch (region) {
        case 0: bytes[i] = 0; break;
        case 1: bytes[i] = (uint8_t)(i / 97); break;
        case 2: bytes[i] = (uint8_t)(next_random(&seed) >> 32); break;
        default: bytes[i] = (uint8_t)(i % 4096 < 1024 ? i * 31 : i >> 16); break;
        }
    }
}

static bool are_alike;

/* Of a region of `size` bytes: how much of it, from its begin on, changes. */
static size_t at_most(size_t size) {
    const size_t begin = 64 << 10;
    return are_alike && size > begin ? begin : size;
}

enum { kChange = 5000 };

/* Overwrite a stretch of `wanted` and say where it is. The first region stays zero. */
static size_t change(uint8_t* wanted, size_t size, int region, uint64_t* state, size_t* length) {
    *length = size < kChange ? size : kChange;
    const size_t offset = next_random(state) % (size - *length + 1);
    for (size_t i = 0; region != 0 && i < *length; ++i)
        wanted[offset + i] = (uint8_t)(next_random(state) >> 32);
    return offset;
}

/* Memory without a name, the same for all processes, and a memfd with a slot for each. */
enum { kSlot = 8192, kSlots = 64, kSharedSeed = 4711 };
static struct {
    uint8_t *same, *slots;
    size_t size;
    unsigned long self; /* whose slot */
} shared;

static void share(size_t size) {
    const int file = memfd_create("steady", MFD_CLOEXEC);
    shared.size = size;
    shared.same = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (file < 0 || ftruncate(file, (off_t)size) != 0)
        _exit(3);
    shared.slots = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    if (shared.same == MAP_FAILED || shared.slots == MAP_FAILED)
        _exit(3);
    fill(shared.same, size, 2, kSharedSeed);
}

static const uint8_t* wanted_of_all(void) {
    static uint8_t* wanted;
    if (wanted == NULL) {
        wanted = malloc(shared.size);
        if (wanted == NULL)
            _exit(3);
        fill(wanted, shared.size, 2, kSharedSeed);
    }
    return wanted;
}

static uint8_t* own_slot(void) {
    if (shared.self >= kSlots)
        _exit(3);
    return shared.slots + shared.self * kSlot;
}

static const uint8_t* wanted_slot(unsigned long step) {
    static uint8_t wanted[kSlot];
    fill(wanted, sizeof wanted, 2, kSharedSeed + shared.self + step);
    return wanted;
}
