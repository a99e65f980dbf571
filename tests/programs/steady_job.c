// SPDX-License-Identifier: Apache-2.0
/* A job that uses GPU memory all the time and knows what must be in it.
 *
 *     steady_job [--mib N] [--pinned-kib N] [--children N] [--plain-children N] [--seed N]
 *                [--plain-threads N] [--cuda 0] [--registered-kib N] [--module FILE] [--streams N]
 *                [--late-children N] [--forked-children N] [--alike 1|2] [--shared-mib N]
 *
 * A tree of processes: one (without CUDA if so asked), its CUDA children, and children without CUDA. A
 * late child is without CUDA until SIGUSR1 comes; a forked child is forked when its parent has a context,
 * and is without CUDA. All of them share N MiB without a name, which nobody changes, and N MiB of a memfd,
 * of which each changes a part of its own. With --alike all children have the first one's memory, and change
 * only the begin of each region, so that it stays alike however far each of them is; with 2, fewer rights. Each CUDA process holds N MiB of device memory (default 4) in four regions - zero,
 * compressible, random, and a pattern that repeats - and N KiB of pinned and of registered host memory
 * (default 0). Again and again it reads all of it, compares each byte with a copy of its own, prints "PID
 * step K ok", and changes a stretch of both. With a module, steady_kernels.cu compiled, each of N streams
 * (default 1) has a kernel, asynchronous copies and a host function under way from one step to the next. A
 * process without CUDA does the same with its own memory, and has N more threads that wait (default 0).
 * What differs is "PID MISMATCH region R offset O", an error of the driver "PID CALL: NAME"; the process
 * then ends with status 1. Every line is one write, so lines do not mix.
 */
#define _GNU_SOURCE
#include "steady_memory.h"
#include <cuda.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { kRegions = 4, kOnLast = 2, kStepMicroseconds = 10000 };

static void say(const char* format, ...) {
    char line[200];
    int length = snprintf(line, sizeof line, "%d ", (int)getpid());
    va_list arguments;
    va_start(arguments, format);
    length += vsnprintf(line + length, sizeof line - (size_t)length, format, arguments);
    va_end(arguments);
    line[length++] = '\n';
    if (write(STDOUT_FILENO, line, (size_t)length) != length)
        _exit(3);
}

static void require(CUresult result, const char* call) {
    if (result == CUDA_SUCCESS)
        return;
    const char* name = "an unknown error";
    cuGetErrorName(result, &name);
    say("%s: %s", call, name);
    _exit(1);
}
#define REQUIRE(call) require((call), #call)

static void compare(const uint8_t* found, const uint8_t* wanted, size_t size, int region) {
    if (memcmp(found, wanted, size) == 0)
        return;
    size_t offset = 0;
    while (found[offset] == wanted[offset])
        ++offset;
    say("MISMATCH region %d offset %zu", region, offset);
    _exit(1);
}

static void step_shared(unsigned long step) {
    if (shared.size == 0)
        return;
    compare(shared.same, wanted_of_all(), shared.size, kRegions + 20);
    if (step > 0)
        compare(own_slot(), wanted_slot(step), kSlot, kRegions + 21);
    memcpy(own_slot(), wanted_slot(step + 1), kSlot);
}

enum { kNumbers = 1024, kRounds = 500, kMaxStreams = 16, kBlock = 65536 };
enum { kFunctionMicroseconds = 3000 };

/* Streams with a kernel under way whenever a step ends. */
struct streams {
    unsigned count;
    CUfunction advance;
    CUstream stream[kMaxStreams];
    CUdeviceptr numbers[kMaxStreams];
    uint64_t* copy[kMaxStreams]; /* pinned: where the asynchronous copy ends */
    uint8_t* block[kMaxStreams]; /* pinned: goes to the GPU and back, as it is, while a step ends */
    CUdeviceptr blocks[kMaxStreams];
    unsigned long functions[kMaxStreams], functions_wanted; /* host functions called */
    CUevent copied[kMaxStreams];
    uint64_t wanted[kMaxStreams][kNumbers], expected[kMaxStreams][kNumbers];
};

static void advance_all(uint64_t* numbers) {
    for (unsigned i = 0; i < kNumbers; ++i)
        for (unsigned round = 0; round < kRounds; ++round)
            next_random(&numbers[i]);
}

static void launch(struct streams* all, unsigned i) {
    unsigned count = kNumbers, rounds = kRounds;
    void* arguments[] = {&all->numbers[i], &count, &rounds};
    REQUIRE(cuLaunchKernel(all->advance, kNumbers / 64, 1, 1, 64, 1, 1, 0, all->stream[i],
                           arguments, NULL));
    advance_all(all->wanted[i]);
}

static void count_call(void* counter) {
    usleep(kFunctionMicroseconds);
    ++*(unsigned long*)counter;
}

/* Behind the kernel: copies to the GPU and back, of bytes that the GPU alone holds meanwhile, and a host
 * function between two copies. All of it is under way when the step ends. */
static void leave_copies(struct streams* all, unsigned i) {
    CUstream stream = all->stream[i];
    REQUIRE(cuMemcpyHtoDAsync(all->blocks[i], all->block[i], kBlock, stream));
    REQUIRE(cuMemcpyDtoDAsync(all->blocks[i] + kBlock, all->blocks[i], kBlock, stream));
    REQUIRE(cuLaunchHostFunc(stream, count_call, &all->functions[i]));
    REQUIRE(cuMemsetD8Async(all->blocks[i], 0x5a, kBlock, stream));
    REQUIRE(cuMemcpyDtoHAsync(all->block[i], all->blocks[i] + kBlock, kBlock, stream));
    REQUIRE(cuMemcpyDtoHAsync(all->block[i] + kBlock, all->blocks[i], kBlock, stream));
}

static void check_copies(struct streams* all, unsigned i) {
    static uint8_t held[2 * kBlock]; /* by the GPU, its halves the other way round */
    REQUIRE(cuStreamSynchronize(all->stream[i]));
    REQUIRE(cuMemcpyDtoH(held, all->blocks[i], sizeof held));
    for (size_t k = 0; k < 2 * kBlock; ++k) {
        const uint8_t wanted = k < kBlock ? (uint8_t)(k * 7 + i + all->functions_wanted) : 0x5a;
        if (all->block[i][k] != wanted || held[(k + kBlock) % sizeof held] != wanted) {
            say("MISMATCH region %d offset %zu", kRegions + 2 + kMaxStreams + (int)i, k);
            _exit(1);
        }
    }
    if (all->functions[i] != all->functions_wanted) {
        say("MISMATCH: %lu host functions, not %lu", all->functions[i], all->functions_wanted);
        _exit(1);
    }
}

static void fill_block(struct streams* all, unsigned i) {
    for (size_t k = 0; k < 2 * kBlock; ++k)
        all->block[i][k] = k < kBlock ? (uint8_t)(k * 7 + i + all->functions_wanted) : 0;
}

/* What the last launch makes goes to the host behind it; another kernel is left under way. */
static void step_streams(struct streams* all) {
    if (all->functions_wanted > 0)
        for (unsigned i = 0; i < all->count; ++i)
            check_copies(all, i);
    ++all->functions_wanted;
    for (unsigned i = 0; i < all->count; ++i) {
        REQUIRE(cuMemcpyDtoHAsync(all->copy[i], all->numbers[i], sizeof all->wanted[i],
                                  all->stream[i]));
        REQUIRE(cuEventRecord(all->copied[i], all->stream[i]));
        memcpy(all->expected[i], all->wanted[i], sizeof all->wanted[i]);
        launch(all, i);
    }
    for (unsigned i = 0; i < all->count; ++i) {
        REQUIRE(cuEventSynchronize(all->copied[i]));
        compare((uint8_t*)all->copy[i], (uint8_t*)all->expected[i], sizeof all->wanted[i],
                kRegions + 2 + (int)i);
    }
    for (unsigned i = 0; i < all->count; ++i) {
        fill_block(all, i);
        leave_copies(all, i);
    }
}

static struct streams* start_streams(const char* path, unsigned count, uint64_t seed) {
    struct streams* all = calloc(1, sizeof *all);
    CUmodule module;
    if (all == NULL || count > kMaxStreams)
        _exit(3);
    all->count = count;
    REQUIRE(cuModuleLoad(&module, path));
    REQUIRE(cuModuleGetFunction(&all->advance, module, "advance"));
    for (unsigned i = 0; i < count; ++i) {
        REQUIRE(cuStreamCreate(&all->stream[i], CU_STREAM_NON_BLOCKING));
        REQUIRE(cuEventCreate(&all->copied[i], CU_EVENT_DISABLE_TIMING));
        REQUIRE(cuMemAlloc(&all->numbers[i], sizeof all->wanted[i]));
        REQUIRE(cuMemHostAlloc((void**)&all->copy[i], sizeof all->wanted[i], 0));
        REQUIRE(cuMemHostAlloc((void**)&all->block[i], 2 * kBlock, 0));
        REQUIRE(cuMemAlloc(&all->blocks[i], 2 * kBlock));
        for (unsigned n = 0; n < kNumbers; ++n)
            all->wanted[i][n] = next_random(&seed);
        REQUIRE(cuMemcpyHtoD(all->numbers[i], all->wanted[i], sizeof all->wanted[i]));
        launch(all, i);
    }
    return all;
}

struct shape {
    size_t size, pinned_size, registered_size;
    unsigned long forked;   /* children */
    const char* module;     /* NULL: no kernels */
    unsigned streams, gpus; /* region kOnLast, which is random, is on the last */
};

static void run_plain(const struct shape* shape, unsigned long threads, uint64_t seed);
static void follow(pid_t parent);

static void run_cuda(const struct shape* shape, uint64_t seed) {
    const size_t size = shape->size, pinned_size = shape->pinned_size;
    const size_t registered_size = shape->registered_size;
    CUdevice device;
    CUcontext context;
    REQUIRE(cuInit(0));
    REQUIRE(cuDeviceGet(&device, 0));
    REQUIRE(cuDevicePrimaryCtxRetain(&context, device));
    REQUIRE(cuCtxSetCurrent(context));
    for (unsigned long child = 0; child < shape->forked; ++child) {
        const pid_t parent = getpid();
        if (fork() == 0) {
            follow(parent);
            shared.self = kSlots - 1 - child;
            run_plain(shape, 0, seed + 7 + child);
        }
    }
    const size_t each = size / kRegions;
    CUdeviceptr memory[kRegions];
    uint8_t* wanted[kRegions];
    uint8_t* found = malloc(each);
    CUcontext last = context;
    if (shape->gpus > 1)
        REQUIRE(cuDevicePrimaryCtxRetain(&last, (CUdevice)shape->gpus - 1));
    for (int region = 0; region < kRegions; ++region) {
        wanted[region] = malloc(each);
        if (wanted[region] == NULL || found == NULL)
            _exit(3);
        fill(wanted[region], each, region, seed);
        REQUIRE(cuCtxSetCurrent(region == kOnLast ? last : context));
        REQUIRE(cuMemAlloc(&memory[region], each));
        REQUIRE(cuMemcpyHtoD(memory[region], wanted[region], each));
    }
    REQUIRE(cuCtxSetCurrent(context));
    void* pinned = NULL;
    uint8_t* pinned_wanted = NULL;
    if (pinned_size > 0) {
        REQUIRE(cuMemHostAlloc(&pinned, pinned_size, 0));
        pinned_wanted = malloc(pinned_size);
        if (pinned_wanted == NULL)
            _exit(3);
        fill(pinned_wanted, pinned_size, 2, seed + 1);
        memcpy(pinned, pinned_wanted, pinned_size);
    }
    uint8_t *registered = NULL, *registered_wanted = NULL;
    if (registered_size > 0) {
        registered = aligned_alloc(4096, (registered_size + 4095) & ~(size_t)4095);
        registered_wanted = malloc(registered_size);
        if (registered == NULL || registered_wanted == NULL)
            _exit(3);
        fill(registered_wanted, registered_size, 2, seed + 2);
        memcpy(registered, registered_wanted, registered_size);
        REQUIRE(cuMemHostRegister(registered, registered_size, 0));
    }
    struct streams* streams = NULL;
    if (shape->module != NULL)
        streams = start_streams(shape->module, shape->streams, seed + 3);
    for (unsigned long step = 0;; ++step) {
        if (streams != NULL)
            step_streams(streams);
        for (int region = 0; region < kRegions; ++region) {
            size_t length;
            REQUIRE(cuCtxSetCurrent(region == kOnLast ? last : context));
            REQUIRE(cuMemcpyDtoH(found, memory[region], each));
            compare(found, wanted[region], each, region);
            const size_t offset = change(wanted[region], at_most(each), region, &seed, &length);
            REQUIRE(cuMemcpyHtoD(memory[region] + offset, wanted[region] + offset, length));
        }
        REQUIRE(cuCtxSetCurrent(context));
        if (pinned_size > 0) {
            size_t length;
            compare(pinned, pinned_wanted, pinned_size, kRegions);
            const size_t offset = change(pinned_wanted, pinned_size, kRegions, &seed, &length);
            memcpy((uint8_t*)pinned + offset, pinned_wanted + offset, length);
        }
        if (registered_size > 0) {
            size_t length;
            compare(registered, registered_wanted, registered_size, kRegions + 1);
            const size_t offset =
                change(registered_wanted, registered_size, kRegions + 1, &seed, &length);
            memcpy(registered + offset, registered_wanted + offset, length);
        }
        step_shared(step);
        say("step %lu ok", step);
        usleep(kStepMicroseconds);
    }
}

static void* wait_forever(void* unused) {
    for (;;)
        poll(NULL, 0, -1);
    return unused;
}

static volatile sig_atomic_t cuda_wanted;

static void want_cuda(int number) {
    (void)number;
    cuda_wanted = 1;
}

static void run_plain(const struct shape* shape, unsigned long threads, uint64_t seed) {
    const size_t size = shape->size;
    for (unsigned long i = 0; i < threads; ++i) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, wait_forever, NULL) != 0)
            _exit(3);
    }
    uint8_t* memory = malloc(size);
    uint8_t* wanted = malloc(size);
    if (memory == NULL || wanted == NULL)
        _exit(3);
    fill(wanted, size, 2, seed);
    memcpy(memory, wanted, size);
    for (unsigned long step = 0; !cuda_wanted; ++step) {
        size_t length;
        compare(memory, wanted, size, 0);
        const size_t offset = change(wanted, at_most(size), 2, &seed, &length);
        memcpy(memory + offset, wanted + offset, length);
        step_shared(step);
        say("step %lu ok", step);
        usleep(kStepMicroseconds);
    }
    run_cuda(shape, seed);
}

/* In the child of a fork: it ends with its parent. */
static void follow(pid_t parent) {
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent)
        _exit(0);
}

int main(int argc, char** argv) {
    struct shape shape = {.size = (size_t)4 << 20, .streams = 1};
    unsigned long children = 0, plain_children = 0, plain_threads = 0, late = 0, alike = 0;
    uint64_t seed = 1;
    bool cuda = true;
    for (int i = 1; i < argc; i += 2) {
        const unsigned long value = i + 1 < argc ? strtoul(argv[i + 1], NULL, 10) : 0;
        if (strcmp(argv[i], "--mib") == 0)
            shape.size = (size_t)value << 20;
        else if (strcmp(argv[i], "--pinned-kib") == 0)
            shape.pinned_size = (size_t)value << 10;
        else if (strcmp(argv[i], "--registered-kib") == 0)
            shape.registered_size = (size_t)value << 10;
        else if (strcmp(argv[i], "--module") == 0 && i + 1 < argc)
            shape.module = argv[i + 1];
        else if (strcmp(argv[i], "--streams") == 0)
            shape.streams = (unsigned)value;
        else if (strcmp(argv[i], "--gpus") == 0)
            shape.gpus = (unsigned)value;
        else if (strcmp(argv[i], "--children") == 0)
            children = value;
        else if (strcmp(argv[i], "--plain-children") == 0)
            plain_children = value;
        else if (strcmp(argv[i], "--late-children") == 0)
            late = value;
        else if (strcmp(argv[i], "--forked-children") == 0)
            shape.forked = value;
        else if (strcmp(argv[i], "--plain-threads") == 0)
            plain_threads = value;
        else if (strcmp(argv[i], "--seed") == 0)
            seed = value + 1;
        else if (strcmp(argv[i], "--alike") == 0)
            alike = value, are_alike = value > 0;
        else if (strcmp(argv[i], "--shared-mib") == 0 && value > 0)
            share((size_t)value << 20);
        else if (strcmp(argv[i], "--cuda") == 0)
            cuda = value != 0;
        else {
            fprintf(stderr, "steady_job: unknown option %s\n", argv[i]);
            return 2;
        }
    }
    struct shape without_forks = shape;
    without_forks.forked = 0;
    for (unsigned long child = 0; child < late + children + plain_children; ++child) {
        const pid_t parent = getpid(), pid = fork();
        if (pid < 0)
            return 3;
        if (pid > 0)
            continue;
        follow(parent);
        shared.self = child + 1;
        const uint64_t own_seed = seed * 1000003 + (alike > 0 ? (uint64_t)-1 : child);
        (void)(alike > 1 && prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0));
        if (child >= late && child < late + children)
            run_cuda(&without_forks, own_seed);
        if (child < late)
            signal(SIGUSR1, want_cuda);
        run_plain(&without_forks, plain_threads, own_seed);
    }
    if (cuda)
        run_cuda(&shape, seed * 1000003 - 1);
    run_plain(&shape, plain_threads, seed * 1000003 - 1);
}
