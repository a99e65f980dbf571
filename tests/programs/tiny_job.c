// SPDX-License-Identifier: Apache-2.0
/* A job whose checkpoint is small, so that each byte of it can be changed in turn.
 *
 *     tiny_job
 *
 * One process, linked statically, with memory that is stored by the plugin and compresses well. It checks all of
 * that at every step and prints "PID step K ok", or ends with status 1.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

enum { kPage = 4096, kPages = 320, kStepMicroseconds = 20000 };

int main(void) {
    const int flags = MAP_PRIVATE | MAP_ANONYMOUS;
    uint8_t* memory = mmap(NULL, (size_t)kPages * kPage, PROT_READ | PROT_WRITE, flags, -1, 0);
    if (memory == MAP_FAILED)
        return 1;
    for (int page = 0; page < kPages; ++page)
        memset(memory + (size_t)page * kPage, page % 250 + 1, kPage);
    for (unsigned long step = 0;; ++step) {
        for (size_t at = 0; at < (size_t)kPages * kPage; ++at)
            if (memory[at] != at / kPage % 250 + 1)
                return 1;
        char line[64];
        const int length = snprintf(line, sizeof line, "%d step %lu ok\n", (int)getpid(), step);
        if (write(STDOUT_FILENO, line, (size_t)length) != length)
            return 1;
        usleep(kStepMicroseconds);
    }
}
