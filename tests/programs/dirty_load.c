// SPDX-License-Identifier: Apache-2.0
/* dirty_load COUNTER MIB WRITTEN-MIB HUGE: fills MIB of memory, then writes to random bytes of the
 * first WRITTEN-MIB of it without a pause, and counts the writes in the file COUNTER. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

int main(int argc, char** argv) {
    if (argc != 5)
        return 2;
    int fd = open(argv[1], O_RDWR);
    volatile uint64_t* count = mmap(NULL, 8, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    size_t size = (size_t)atol(argv[2]) << 20, written = (size_t)atol(argv[3]) << 20;
    size_t huge = 2 << 20;
    char* room =
        mmap(NULL, size + huge, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (count == MAP_FAILED || room == MAP_FAILED || written == 0)
        return 3;
    char* memory = (char*)(((uintptr_t)room + huge - 1) & ~(uintptr_t)(huge - 1));
    madvise(room, size + huge, atoi(argv[4]) ? MADV_HUGEPAGE : MADV_NOHUGEPAGE);
    memset(memory, 1, size);
    puts("ready");
    fflush(stdout);
    uint64_t random = 88172645463325252ULL;
    for (uint64_t done = 0;; ++done) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        ++memory[random % written];
        if (done % 1024 == 0)
            *count = done;
    }
}
