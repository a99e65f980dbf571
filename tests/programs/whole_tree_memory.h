// SPDX-License-Identifier: Apache-2.0
/* The memories of whole_tree.c: what must be in each, written and checked. */
#pragma once
#define _GNU_SOURCE
#include <cuda.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
enum { kGroups = 7, kLeaves = 6, kMembers = kLeaves + 1, kProcesses = 1 + kGroups * kMembers };
enum { kMaxAreas = 24, kPage = 4096, kWords = kPage / 8, kSlot = 8, kHole = 8, kWrongRound = 3 };

enum owner {
    kOwn,
    kOfAll,
    kOfGroup,
    kCopied
}; /* copied: on write, from the process that made it */

/* One memory. at: where it is mapped, NULL: it is read and written through fd; kept: the descriptor that all
 * members have from their parent, fd: one that this process has opened itself. path: it is opened by
 * that again each time. gpu: its address there. */
struct area {
    const char* kind;
    size_t bytes;
    uint64_t seed;
    enum owner owner;
    uint64_t* at;
    int fd, kept;
    const char* path;
    CUdeviceptr gpu;
};

static int self, group = -1; /* of kGroups; -1: the first process, which is in none */
static uint64_t seed = 1;
static uint32_t this_round;
static struct area areas[kMaxAreas];
static int area_count;
static const char *wrong = "", *disk, *tmpfs;
static int wrong_in;

static void say_and_end(const char* format, ...) {
    char line[300];
    va_list arguments;
    va_start(arguments, format);
    const int length = vsnprintf(line, sizeof line - 1, format, arguments);
    va_end(arguments);
    line[length] = '\n';
    (void)!write(STDOUT_FILENO, line, (size_t)length + 1);
    kill(0, SIGKILL);
    _exit(1);
}

static void fail(const char* kind, size_t place, uint64_t found, uint64_t wanted) {
    say_and_end("WRONG %s process %d place %zu round %u: %llx, not %llx", kind, self, place,
                this_round, (unsigned long long)found, (unsigned long long)wanted);
}

#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition))                                                                          \
            say_and_end("WRONG call process %d round %u: %s: %s", self, this_round, #condition,    \
                        strerror(errno));                                                          \
    } while (0)
#define CUDA(call) REQUIRE((call) == CUDA_SUCCESS)

static uint64_t word(uint64_t from, uint64_t i) {
    uint64_t x = from + (i + 1) * 0x9e3779b97f4a7c15u;
    x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9u;
    return x ^ x >> 29;
}

static bool is_wrong(const char* kind) {
    return self == wrong_in && this_round == kWrongRound && strcmp(wrong, kind) == 0;
}

static int first_member(void) {
    return 1 + group * kMembers;
}

static int writer(const struct area* area, size_t page) {
    if (area->owner == kOwn)
        return self;
    if (area->owner == kOfGroup)
        return first_member() + (int)(page % kMembers);
    return (int)(page % kProcesses);
}

/* What is there when all have written in that round. One page of eight was never written. */
static uint64_t wanted(const struct area* area, size_t i, uint32_t round) {
    const size_t page = i / kWords;
    if (page % kHole == kHole - 1)
        return 0;
    if (i % kWords >= kSlot || (area->owner == kCopied && writer(area, page) != self))
        round = 0;
    return word(area->seed + round * 0x100000001b3u, i);
}

static void write_all(const struct area* area) {
    uint64_t page[kWords];
    for (size_t first = 0; first < area->bytes / 8; first += kWords) {
        if (first / kWords % kHole == kHole - 1)
            continue;
        for (size_t i = 0; i < kWords; ++i)
            page[i] = wanted(area, first + i, 0);
        if (area->gpu != 0)
            CUDA(cuMemcpyHtoD(area->gpu + first * 8, page, kPage));
        else if (area->at != NULL)
            memcpy(area->at + first, page, kPage);
        else
            REQUIRE(pwrite(area->kept, page, kPage, (off_t)first * 8) == kPage);
    }
}

static int open_again(const struct area* area) {
    const int fd = area->path != NULL ? open(area->path, O_RDWR | O_CLOEXEC) : area->fd;
    REQUIRE(fd >= 0);
    return fd;
}

static void put(const struct area* area, size_t first, const uint64_t* words, size_t count) {
    if (area->gpu != 0) {
        CUDA(cuMemcpyHtoD(area->gpu + first * 8, words, count * 8));
    } else if (area->at != NULL) {
        memcpy(area->at + first, words, count * 8);
    } else {
        const int fd = open_again(area);
        REQUIRE(pwrite(fd, words, count * 8, (off_t)first * 8) == (ssize_t)(count * 8));
        if (fd != area->fd)
            close(fd);
    }
}

static void write_slots(const struct area* area) {
    for (size_t page = 0; page < area->bytes / kPage; ++page) {
        uint64_t slot[kSlot];
        if (page % kHole == kHole - 1 || writer(area, page) != self)
            continue;
        for (size_t i = 0; i < kSlot; ++i)
            slot[i] = wanted(area, page * kWords + i, this_round);
        put(area, page * kWords, slot, kSlot);
    }
}

static const uint64_t* content(const struct area* area) {
    static uint64_t copy[4 * MIB / 8]; /* of what is no memory here, one after the other */
    if (area->at != NULL)
        return area->at;
    if (area->gpu != 0) {
        CUDA(cuMemcpyDtoH(copy, area->gpu, area->bytes));
        return copy;
    }
    const int fd = open_again(area);
    REQUIRE(pread(fd, copy, sizeof copy, 0) == (ssize_t)area->bytes); /* and no more is there */
    if (fd != area->fd)
        close(fd);
    return copy;
}

/* Of a descriptor that is this process's alone, and of one that all members share. */
static off_t own_offset(const struct area* area) {
    return (off_t)(word(area->seed + (uint64_t)self, this_round) % area->bytes);
}
static off_t shared_offset(const struct area* area) {
    return (off_t)(word(area->seed, this_round) % area->bytes);
}

static void set_offsets(const struct area* area) {
    if (area->fd >= 0)
        REQUIRE(lseek(area->fd, own_offset(area), SEEK_SET) == own_offset(area));
    if (area->kept >= 0 && area->fd != area->kept && self == first_member())
        REQUIRE(lseek(area->kept, shared_offset(area), SEEK_SET) == shared_offset(area));
}

static void check_offset(const char* kind, int fd, off_t place) {
    const off_t found = lseek(fd, 0, SEEK_CUR);
    if (found != place)
        fail(kind, (size_t)fd, (uint64_t)found, (uint64_t)place);
}

static void check_word(const struct area* area, size_t i, uint64_t found, uint64_t must_be) {
    if (found != must_be)
        fail(area->kind, i, found, must_be);
}

static void check(const struct area* area) {
    if (area->fd >= 0)
        check_offset("own-offset", area->fd, own_offset(area));
    if (area->kept >= 0 && area->fd != area->kept)
        check_offset("shared-offset", area->kept, shared_offset(area));
    const uint64_t* found = content(area);
    for (size_t first = 0; first < area->bytes / 8; first += kWords) {
        const bool hole = first / kWords % kHole == kHole - 1;
        for (size_t i = first; i < first + kSlot; ++i)
            check_word(area, i, found[i], wanted(area, i, this_round));
        for (size_t i = first + kSlot; i < first + kWords; ++i)
            check_word(area, i, found[i], hole ? 0 : word(area->seed, i));
    }
}
