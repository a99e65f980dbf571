// SPDX-License-Identifier: Apache-2.0
// A tree without CUDA whose processes share memory, check all of it at every step, and say so.
//
//   shared_job [--mib N] [--children N] [--sealed 1] [--fds 0] [--tmpfs 1] [--reader 1]
//
// Each process prints "PID step N ok" for a step in which every byte was right and every other process was
// seen to write. There are N MiB of shared anonymous memory and N MiB of a memfd, both with holes that no page
// fills, a memfd that only the children map, and one that ends within a page. --sealed: the memfd is sealed
// against new writers. --fds 0: no descriptor of the memfd is kept. --tmpfs: files in /dev/shm that were removed,
// in place of memfds. --reader: the last child has the first of them open, and not mapped.
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define MAX_PROCESSES 16
#define STEP_US 20000
#define SILENCE_S 60 // a machine may be busy; memory that is not shared stays silent for ever

struct area {
    uint8_t* at;
    size_t bytes;
    uint64_t seed;
};

struct common {
    _Atomic uint64_t steps[MAX_PROCESSES];
    uint64_t own[MAX_PROCESSES]; // seed of what that process writes
};

static size_t processes;
static size_t self;
static struct common* common;

static void fail(const char* what, const void* where) {
    printf("%d WRONG: %s at %p\n", (int)getpid(), what, where);
    fflush(stdout);
    _exit(1);
}

static uint64_t word(uint64_t seed, uint64_t i) {
    if (seed % 2 == 0) // compresses
        return seed + i / 64;
    uint64_t x = seed * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
    return x * 0x94d049bb133111ebu;
}

static void fill(uint8_t* at, size_t bytes, uint64_t seed) {
    for (size_t i = 0; i < bytes / 8; ++i)
        ((uint64_t*)at)[i] = word(seed, i);
}

static void check(const uint8_t* at, size_t bytes, uint64_t seed, const char* what) {
    for (size_t i = 0; i < bytes / 8; ++i)
        if (((const uint64_t*)at)[i] != word(seed, i))
            fail(what, at + i * 8);
}

// Every fourth MiB is a hole, every other fourth is one process's to write.
static int is_hole(size_t mib) {
    return mib % 4 == 3;
}
static size_t writer(size_t mib) {
    return mib % 4 == 2 ? mib / 4 % processes : MAX_PROCESSES;
}

static void fill_all(const struct area* area) {
    for (size_t i = 0; i < area->bytes / MIB; ++i)
        if (!is_hole(i))
            fill(area->at + i * MIB, MIB, area->seed + i);
}

static void check_all(const struct area* area, uint64_t own) {
    for (size_t i = 0; i < area->bytes / MIB; ++i) {
        if (is_hole(i))
            continue;
        const size_t by = writer(i);
        if (by == MAX_PROCESSES)
            check(area->at + i * MIB, MIB, area->seed + i, "shared memory");
        else if (by == self)
            check(area->at + i * MIB, MIB, area->seed + i + own, "shared memory of its writer");
    }
}

static void write_own(const struct area* area, uint64_t own) {
    for (size_t i = 0; i < area->bytes / MIB; ++i)
        if (!is_hole(i) && writer(i) == self)
            fill(area->at + i * MIB, MIB, area->seed + i + own);
}

static void check_holes(const struct area* area, int fd) {
    for (size_t i = 0; i < area->bytes / MIB; ++i)
        if (is_hole(i) && lseek(fd, (off_t)(i * MIB), SEEK_DATA) < (off_t)((i + 1) * MIB) &&
            i + 1 < area->bytes / MIB)
            fail("a hole is filled", area->at + i * MIB);
}

// What a process has not mapped it reads and writes as a file.
static void load(const struct area* area, int fd) {
    for (size_t done = 0; done < area->bytes;) {
        const ssize_t got = pread(fd, area->at + done, area->bytes - done, (off_t)done);
        if (got <= 0)
            fail("a file is short", area->at + done);
        done += (size_t)got;
    }
}

static void store_own(const struct area* area, int fd) {
    for (size_t i = 0; i < area->bytes / MIB; ++i)
        if (!is_hole(i) && writer(i) == self &&
            pwrite(fd, area->at + i * MIB, MIB, (off_t)(i * MIB)) != (ssize_t)MIB)
            fail("a file cannot be written", area->at + i * MIB);
}

static uint8_t* map(int fd, size_t bytes, off_t offset) {
    const int flags = MAP_SHARED | (fd < 0 ? MAP_ANONYMOUS : 0);
    uint8_t* at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags, fd, offset);
    if (at == MAP_FAILED)
        fail("no memory", NULL);
    return at;
}

static int make_file(const char* name, size_t bytes, int on_tmpfs) {
    char path[100];
    snprintf(path, sizeof path, "/dev/shm/shared_job %d %s", (int)getpid(), name);
    const int fd = on_tmpfs ? open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600)
                            : memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (on_tmpfs && fd >= 0 && unlink(path) != 0)
        fail("no file can be removed", NULL);
    if (fd < 0 || ftruncate(fd, (off_t)bytes) != 0)
        fail("no file", NULL);
    return fd;
}

static void await_others(void) {
    uint64_t seen[MAX_PROCESSES];
    for (size_t i = 0; i < processes; ++i)
        seen[i] = common->steps[i];
    for (size_t i = 0; i < processes; ++i)
        for (int waited = 0; i != self && common->steps[i] == seen[i]; ++waited) {
            ++common->steps[self]; // the others may wait for this one
            if (waited > SILENCE_S * 100)
                fail("a process is not heard of", common);
            usleep(10000);
        }
}

static size_t number(int argc, char** argv, const char* name, size_t otherwise) {
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0)
            return strtoul(argv[i + 1], NULL, 10);
    return otherwise;
}

int main(int argc, char** argv) {
    const size_t mib = number(argc, argv, "--mib", 40);
    const size_t children = number(argc, argv, "--children", 1);
    processes = children + 1;
    common = (struct common*)map(-1, PAGE, 0);
    struct area areas[2] = {{map(-1, mib * MIB, 0), mib * MIB, 1}};
    size_t count = 1;
    const int on_tmpfs = number(argc, argv, "--tmpfs", 0) != 0;
    const int memfd = make_file("of all", mib * MIB, on_tmpfs);
    areas[count++] = (struct area){map(memfd, mib * MIB, 0), mib * MIB, 1001};
    const size_t odd = 3 * MIB + 1000;
    const int ends_within_page = make_file("odd", odd, on_tmpfs);
    uint8_t* at_odd = map(ends_within_page, odd, 0);
    fill(at_odd, odd, 5);
    const int of_children = make_file("of children", 4 * MIB, on_tmpfs);
    for (size_t i = 0; i < count; ++i)
        fill_all(&areas[i]);
    if (number(argc, argv, "--sealed", 0) != 0 &&
        fcntl(memfd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE) != 0)
        fail("no seal", NULL);
    if (number(argc, argv, "--fds", 1) == 0)
        close(memfd);
    for (size_t i = 1; i <= children; ++i)
        if (fork() == 0) {
            self = i;
            prctl(PR_SET_PDEATHSIG, SIGKILL);
            break;
        }
    const int reads = self != 0 && self == children && number(argc, argv, "--reader", 0) != 0;
    if (reads) {
        munmap(areas[1].at, areas[1].bytes);
        areas[1].at =
            mmap(NULL, areas[1].bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (areas[1].at == MAP_FAILED)
            fail("no memory", NULL);
    }
    // Each maps the two halves in another order.
    uint8_t* halves[2] = {NULL, NULL};
    if (self != 0)
        for (size_t i = 0; i < 2; ++i)
            halves[(self + i) % 2] = map(of_children, 2 * MIB, (off_t)((self + i) % 2 * 2 * MIB));
    if (self == 1)
        for (size_t i = 0; i < 2; ++i)
            fill(halves[i], 2 * MIB, 7 + i);
    ++common->steps[self];
    await_others();
    uint64_t own = 0;
    for (size_t step = 1;; ++step) {
        for (size_t i = 0; i < count; ++i) {
            if (i == 1 && reads)
                load(&areas[i], memfd);
            check_all(&areas[i], own);
        }
        if (number(argc, argv, "--fds", 1) != 0)
            check_holes(&areas[1], memfd);
        check(at_odd, odd, 5, "a file that ends within a page");
        for (size_t i = 0; i < 2 && self != 0; ++i)
            check(halves[i], 2 * MIB, 7 + i, "memory of children");
        if (step % 4 == 0) {
            own += 2 * MAX_PROCESSES;
            for (size_t i = 0; i < count; ++i)
                write_own(&areas[i], own);
            if (reads)
                store_own(&areas[1], memfd);
        }
        ++common->steps[self];
        await_others();
        printf("%d step %zu ok\n", (int)getpid(), step);
        fflush(stdout);
        usleep(STEP_US);
    }
}
