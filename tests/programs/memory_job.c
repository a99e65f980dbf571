// SPDX-License-Identifier: Apache-2.0
// A tree without CUDA whose processes check all of their memory at every step, and say so.
//
//   memory_job [--mib N] [--threads N] [--children N] [--holes MIB] [--sparse MIB]
//
// Each process prints "PID step N ok" for a step in which every byte was right, and ends with 1, saying
// what was wrong, after one in which it was not. Half of the memory is the heap, half mapped; there are
// holes in it, parts that are protected or advised, stacks in use, and what children share with the first
// process until either writes to it.
#define _GNU_SOURCE
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

#define MIB ((size_t)1 << 20)
#define PAGE ((size_t)4096)
#define MAX_AREAS 8192
#define STEP_US 20000

struct area {
    uint64_t* words;
    size_t count;
    uint64_t seed;
    int protection; // what it has but while it is checked
    const char* name;
};

static struct area areas[MAX_AREAS];
static size_t area_count;
static uint8_t* holes; // every other MiB is absent
static size_t holes_mib;

static void fail(const char* what, const void* where) {
    printf("%d WRONG: %s at %p\n", (int)getpid(), what, where);
    fflush(stdout);
    _exit(1);
}

// Every other area compresses.
static uint64_t word(uint64_t seed, uint64_t i) {
    if (seed % 2 == 0)
        return seed + i / 64;
    uint64_t x = seed * 0x9e3779b97f4a7c15u + i * 0xbf58476d1ce4e5b9u;
    x ^= x >> 29;
    return x * 0x94d049bb133111ebu;
}

static void fill(struct area* area) {
    for (size_t i = 0; i < area->count; ++i)
        area->words[i] = word(area->seed, i);
}

static void check(const struct area* area) {
    for (size_t i = 0; i < area->count; ++i)
        if (area->words[i] != word(area->seed, i))
            fail(area->name, &area->words[i]);
}

static void protect(const struct area* area, int protection) {
    if (area->protection != (PROT_READ | PROT_WRITE) &&
        mprotect(area->words, area->count * 8, protection) != 0)
        fail("mprotect", area->words);
}

static struct area* add(void* at, size_t bytes, const char* name) {
    if (at == NULL || at == MAP_FAILED || area_count == MAX_AREAS)
        fail("no memory", at);
    struct area* area = &areas[area_count];
    *area = (struct area){at, bytes / 8, area_count + 1, PROT_READ | PROT_WRITE, name};
    ++area_count;
    fill(area);
    return area;
}

static void* map(size_t bytes) {
    return mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

static void add_mapped(size_t bytes, int advice, int protection, const char* name) {
    void* at = map(bytes);
    if (advice >= 0 && madvise(at, bytes, advice) != 0)
        fail("madvise", at);
    struct area* area = add(at, bytes, name);
    area->protection = protection;
    protect(area, protection);
}

// A kernel that gives huge pages to all would fill the holes.
static void ask_small_pages(void* at, size_t bytes) {
    if (madvise(at, bytes, MADV_NOHUGEPAGE) != 0)
        fail("madvise", at);
}

static void make_holes(size_t mib) {
    if (mib == 0)
        return;
    holes = map(mib * MIB);
    holes_mib = mib;
    ask_small_pages(holes, mib * MIB);
    for (size_t i = 0; i < mib; i += 2)
        add(holes + i * MIB, MIB, "beside a hole");
}

static void check_holes(void) {
    static uint64_t entries[MIB / PAGE];
    const int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    for (size_t i = 1; i < holes_mib; i += 2) {
        uint8_t* at = holes + i * MIB;
        const off_t offset = (off_t)((uintptr_t)at / PAGE * 8);
        if (pread(pagemap, entries, sizeof entries, offset) != (ssize_t)sizeof entries)
            fail("pagemap", at);
        for (size_t page = 0; page < MIB / PAGE; ++page)
            if (entries[page] >> 62 != 0)
                fail("a hole is filled", at + page * PAGE);
    }
    close(pagemap);
}

// Small pages with holes, for which huge ones are asked from now on.
static void add_sparse(size_t mib) {
    if (mib == 0)
        return;
    uint8_t* at = map(mib * MIB);
    ask_small_pages(at, mib * MIB);
    for (size_t i = 0; i < mib; i += 2)
        add(at + i * MIB, 128 << 10, "in holes advised: huge pages");
    if (madvise(at, mib * MIB, MADV_HUGEPAGE) != 0)
        fail("madvise", at);
}

static void check_all(void) {
    for (size_t i = 0; i < area_count; ++i) {
        protect(&areas[i], PROT_READ);
        check(&areas[i]);
        protect(&areas[i], areas[i].protection);
    }
    check_holes();
}

// Its own arena, and far more of a stack than is near its stack pointer.
static void* run_thread(void* number) {
    enum { kBlocks = 64, kDeep = 3 << 20 };
    struct area own[kBlocks];
    volatile uint8_t deep[kDeep];
    for (size_t i = 0; i < kDeep; ++i)
        deep[i] = (uint8_t)(i / 7 + (size_t)number);
    for (size_t i = 0; i < kBlocks; ++i) {
        own[i] =
            (struct area){malloc(64 << 10), 8 << 10, (size_t)number * 1000 + i, 0, "a thread's"};
        fill(&own[i]);
    }
    for (size_t step = 0;; ++step) {
        for (size_t i = 0; i < kBlocks; ++i)
            check(&own[i]);
        for (size_t i = 0; i < kDeep; ++i)
            if (deep[i] != (uint8_t)(i / 7 + (size_t)number))
                fail("a thread's stack", (const void*)&deep[i]);
        own[step % kBlocks].seed += 1000000;
        fill(&own[step % kBlocks]);
        usleep(STEP_US);
    }
    return NULL;
}

static void start_threads(size_t count) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 8 * MIB);
    for (size_t i = 0; i < count; ++i) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, run_thread, (void*)(i + 1)) != 0)
            fail("pthread_create", NULL);
    }
}

static size_t number(int argc, char** argv, const char* name, size_t otherwise) {
    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], name) == 0)
            return strtoul(argv[i + 1], NULL, 10);
    return otherwise;
}

int main(int argc, char** argv) {
    const size_t mib = number(argc, argv, "--mib", 200);
    const size_t threads = number(argc, argv, "--threads", 4);
    size_t children = number(argc, argv, "--children", 0);
    for (size_t i = 0; i < mib * 5; ++i) // below what malloc maps: half of it all
        add(malloc(100 << 10), 100 << 10, "the heap");
    for (size_t i = 0; i < mib / 2 / 10; ++i)
        add_mapped(10 * MIB, -1, PROT_READ | PROT_WRITE, "mapped");
    make_holes(number(argc, argv, "--holes", 16));
    add_mapped(4 * MIB, -1, PROT_READ, "read-only");
    add_mapped(4 * MIB, -1, PROT_NONE, "protected");
    add_mapped(4 * MIB, MADV_NOHUGEPAGE, PROT_READ | PROT_WRITE, "advised: small pages");
    add_mapped(8 * MIB, MADV_HUGEPAGE, PROT_READ | PROT_WRITE, "advised: huge pages");
    add_mapped(4 * MIB, MADV_DONTDUMP, PROT_READ | PROT_WRITE, "advised: no core dump");
    add_sparse(number(argc, argv, "--sparse", 64));
    while (children != 0 && fork() != 0)
        --children;
    if (children != 0)
        prctl(PR_SET_PDEATHSIG, SIGKILL);
    start_threads(threads);
    for (size_t step = 1;; ++step) {
        check_all();
        if (step % 4 == 0)
            add(malloc(100 << 10), 100 << 10, "the heap, grown");
        // A child leaves most of what it has got from its parent alone: that stays shared.
        struct area* area = &areas[step * 7 % (children != 0 ? area_count / 4 : area_count)];
        if (area->protection == (PROT_READ | PROT_WRITE)) {
            area->seed += 2 * MAX_AREAS;
            fill(area);
        }
        printf("%d step %zu ok\n", (int)getpid(), step);
        fflush(stdout);
        usleep(STEP_US);
    }
}
