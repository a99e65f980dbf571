// SPDX-License-Identifier: Apache-2.0
/* Preloaded into a job: what the driver's restore thread maps to stage GPU memory in is shared and
 * locked memory, whose pages cannot be dropped.
 */
#define _GNU_SOURCE
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

void* mmap(void* address, size_t size, int protection, int flags, int fd, off_t offset) {
    char name[16] = "";
    prctl(PR_GET_NAME, name, 0, 0, 0);
    const int staging = MAP_PRIVATE | MAP_ANONYMOUS;
    if (flags == staging && size >= 1 << 20 && strncmp(name, "cuda", 4) == 0)
        flags = MAP_SHARED | MAP_ANONYMOUS | MAP_LOCKED;
    return (void*)syscall(SYS_mmap, address, size, protection, flags, fd, offset);
}
