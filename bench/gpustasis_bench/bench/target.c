// SPDX-License-Identifier: Apache-2.0
/* Holds GPU memory and little else unless asked to: the process that the benchmark dumps and restores.
 *
 *     target            in a folder of its own, which is its working directory
 *
 * It writes "ok ready" to the file `answer`. Then, at each SIGUSR1, it does what the file `request`
 * says and writes a new `answer`, "ok ..." or "error ...":
 *
 *     load LAYOUT       allocate the layout's segments, if that was not done, and copy its bytes
 *     hash              answer with a hash of all segments, read back from the GPU
 *     spread GPUS BYTES  allocate so many bytes on each of so many GPUs, its own first, and fill them
 *     hold BYTES        have CPU memory as well, of which half compresses; it is hashed too
 *     change PERCENT SEED  overwrite that share of the memory, always the same blocks, with noise
 *     watch             from now on, touch the GPU twice in a millisecond
 *     gap               answer with the longest time between two touches, in ns, and stop touching
 *
 * `target TASKS` is a tree of so many such processes; the second works in `task-1`, and so on. All
 * use the first GPU; with `target TASKS own` the second uses the second GPU and no other, and so on.
 * It keeps no file open and no buffer between requests, so that nearly all it has is on the GPU.
 * Layouts: content.py. Needs libcuda.so.1 when it runs, nothing of CUDA to be compiled.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
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
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef unsigned long long device_pointer;

static int (*cu_init)(unsigned);
static int (*cu_device_get)(int*, int);
static int (*cu_primary_context)(void**, int);
static int (*cu_set_current)(void*);
static int (*cu_alloc)(device_pointer*, size_t);
static int (*cu_set_bytes)(device_pointer, unsigned char, size_t);
static int (*cu_to_device)(device_pointer, const void*, size_t);
static int (*cu_to_host)(void*, device_pointer, size_t);

enum {
    kBlockSize = 2 << 20,
    kBufferSize = 2 * kBlockSize,
    kMaxSegments = 1 << 16,
    kMaxGpus = 16,
    kLine = 4200
};

static int home; /* its own GPU */
static void* contexts[kMaxGpus];
static struct {
    device_pointer address;
    size_t size;
    int gpu;
} segments[kMaxSegments];
static char *buffer, *held;
static size_t segment_count, held_size;

static void answer(const char* format, ...) {
    FILE* file = fopen("answer.part", "w");
    if (file == NULL)
        _exit(3);
    va_list arguments;
    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
    if (fclose(file) != 0 || rename("answer.part", "answer") != 0)
        _exit(3);
}

#define FAIL(...)                                                                                  \
    do {                                                                                           \
        answer("error " __VA_ARGS__);                                                              \
        return -1;                                                                                 \
    } while (0)
#define TRY(call)                                                                                  \
    do {                                                                                           \
        const int result_ = (call);                                                                \
        if (result_ != 0)                                                                          \
            FAIL(#call ": CUresult %d\n", result_);                                                \
    } while (0)

static int find_driver(void) {
    const struct {
        const char* name;
        void* function;
    } wanted[] = {
        {"cuInit", &cu_init},
        {"cuDeviceGet", &cu_device_get},
        {"cuDevicePrimaryCtxRetain", &cu_primary_context},
        {"cuCtxSetCurrent", &cu_set_current},
        {"cuMemAlloc_v2", &cu_alloc},
        {"cuMemsetD8_v2", &cu_set_bytes},
        {"cuMemcpyHtoD_v2", &cu_to_device},
        {"cuMemcpyDtoH_v2", &cu_to_host},
    };
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    if (library == NULL)
        FAIL("%s\n", dlerror());
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; ++i) {
        void* found = dlsym(library, wanted[i].name);
        if (found == NULL)
            FAIL("libcuda.so.1 has no %s\n", wanted[i].name);
        memcpy(wanted[i].function, &found, sizeof found);
    }
    return 0;
}

/* The GPU whose memory the next calls are about. */
static int use_gpu(int gpu) {
    int device = 0;
    if (contexts[gpu] == NULL) {
        TRY(cu_device_get(&device, gpu));
        TRY(cu_primary_context(&contexts[gpu], device));
    }
    TRY(cu_set_current(contexts[gpu]));
    return 0;
}

static int start_driver(void) {
    TRY(cu_init(0));
    return use_gpu(home);
}

static int copy_bytes(int file, size_t segment, size_t offset, size_t size, off_t at) {
    if (segment >= segment_count || offset + size > segments[segment].size)
        FAIL("segment %zu has no %zu bytes at %zu\n", segment, size, offset);
    for (size_t done = 0; done < size;) {
        const size_t wanted = size - done < kBufferSize ? size - done : kBufferSize;
        const ssize_t got = pread(file, buffer, wanted, at + (off_t)done);
        if (got <= 0)
            FAIL("cannot read %zu bytes of the content at %lld\n", wanted, (long long)at);
        TRY(cu_to_device(segments[segment].address + offset + done, buffer, (size_t)got));
        done += (size_t)got;
    }
    return 0;
}

static int add_segment(size_t index, size_t size) {
    if (index < segment_count) {
        if (segments[index].size != size)
            FAIL("segment %zu has another size\n", index);
        return 0;
    }
    if (segment_count == kMaxSegments)
        FAIL("too many segments\n");
    TRY(cu_alloc(&segments[segment_count].address, size));
    TRY(cu_set_bytes(segments[segment_count].address, 0, size));
    segments[segment_count].gpu = home;
    segments[segment_count++].size = size;
    return 0;
}

static void make_noise(uint64_t* state, size_t size) {
    for (size_t at = 0; at < size; at += sizeof *state) {
        *state = *state * 6364136223846793005u + 1442695040888963407u;
        memcpy(buffer + at, state, sizeof *state);
    }
}

/* Every block in its turn adds its share, and is overwritten whenever that makes a whole one: the
 * blocks lie evenly over all memory. Another seed gives other bytes in the same blocks, so however
 * often this is done, what the memory consists of stays the same. */
static int change(unsigned percent, uint64_t seed) {
    if (percent > 100)
        FAIL("cannot change %u percent\n", percent);
    uint64_t state = seed;
    size_t changed = 0;
    unsigned share = 0;
    for (size_t i = 0; i < segment_count; ++i) {
        if (use_gpu(segments[i].gpu) != 0)
            return -1;
        for (size_t offset = 0; offset < segments[i].size; offset += kBlockSize) {
            share += percent;
            if (share < 100)
                continue;
            share -= 100;
            const size_t left = segments[i].size - offset;
            const size_t size = left < kBlockSize ? left : kBlockSize;
            make_noise(&state, kBlockSize);
            TRY(cu_to_device(segments[i].address + offset, buffer, size));
            changed += size;
        }
    }
    if (use_gpu(home) != 0)
        return -1;
    answer("ok %zu\n", changed);
    return 0;
}

/* Noise, another one for each GPU and task. */
static int spread(int gpus, size_t size) {
    if (gpus < 1 || gpus > kMaxGpus - home || segment_count != 0)
        FAIL("cannot spread over %d GPUs\n", gpus);
    uint64_t state = (uint64_t)getpid();
    for (int gpu = 0; gpu < gpus; ++gpu) {
        if (use_gpu(home + gpu) != 0 || add_segment(segment_count, size) != 0)
            return -1;
        segments[segment_count - 1].gpu = home + gpu;
        for (size_t done = 0; done < size; done += kBufferSize) {
            make_noise(&state, kBufferSize);
            const size_t left = size - done;
            TRY(cu_to_device(segments[gpu].address + done, buffer,
                             left < kBufferSize ? left : kBufferSize));
        }
    }
    return use_gpu(home);
}

static struct {
    bool on;
    uint64_t last, greatest;
} watch;

static void touch(void) {
    char byte;
    struct timespec now;
    if (segment_count == 0 || cu_to_host(&byte, segments[0].address, 1) != 0)
        return; /* a gap without end is seen as one */
    clock_gettime(CLOCK_MONOTONIC, &now);
    const uint64_t ns = (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
    if (watch.last != 0 && ns - watch.last > watch.greatest)
        watch.greatest = ns - watch.last;
    watch.last = ns;
}

static int follow(FILE* layout) {
    char line[kLine];
    int file = -1, result = 0;
    size_t seen = 0, segment = 0, offset = 0, size = 0;
    long long at = 0;
    while (result == 0 && fgets(line, sizeof line, layout) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        if (strncmp(line, "file ", 5) == 0) {
            file = open(line + 5, O_RDONLY | O_CLOEXEC);
            if (file < 0) {
                answer("error cannot open %s: %s\n", line + 5, strerror(errno));
                result = -1;
            }
        } else if (sscanf(line, "segment %zu", &size) == 1) {
            result = add_segment(seen++, size);
        } else if (sscanf(line, "copy %zu %zu %zu %lld", &segment, &offset, &size, &at) == 4) {
            result = copy_bytes(file, segment, offset, size, (off_t)at);
        } else {
            answer("error a layout says: %s\n", line);
            result = -1;
        }
    }
    if (file >= 0)
        close(file);
    return result;
}

/* The rounds of XXH64 over whole blocks of 32 bytes; segments are multiples of 2 MiB. */
static void add_to_hash(uint64_t lanes[4], const char* bytes, size_t size) {
    for (size_t at = 0; at + 32 <= size; at += 32) {
        for (int lane = 0; lane < 4; ++lane) {
            uint64_t word;
            memcpy(&word, bytes + at + 8 * (size_t)lane, 8);
            word = lanes[lane] + word * 0xC2B2AE3D27D4EB4Fu;
            lanes[lane] = (word << 31 | word >> 33) * 0x9E3779B185EBCA87u;
        }
    }
}

static int hash(void) {
    uint64_t lanes[4] = {1, 2, 3, 4};
    size_t total = 0;
    for (size_t i = 0; i < segment_count; ++i) {
        if (use_gpu(segments[i].gpu) != 0)
            return -1;
        for (size_t done = 0; done < segments[i].size;) {
            const size_t left = segments[i].size - done;
            const size_t size = left < kBufferSize ? left : kBufferSize;
            TRY(cu_to_host(buffer, segments[i].address + done, size));
            add_to_hash(lanes, buffer, size);
            done += size;
        }
        total += segments[i].size;
    }
    if (use_gpu(home) != 0)
        return -1;
    add_to_hash(lanes, held, held_size);
    total += held_size;
    answer("ok %016llx%016llx%016llx%016llx %zu\n", (unsigned long long)lanes[0],
           (unsigned long long)lanes[1], (unsigned long long)lanes[2], (unsigned long long)lanes[3],
           total);
    return 0;
}

static int hold(size_t size) {
    uint64_t state = ~(uint64_t)getpid(); // other noise than the GPU has: alike is stored once
    held = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (held == MAP_FAILED || size % kBlockSize != 0)
        FAIL("cannot hold %zu bytes\n", size);
    held_size = size;
    for (size_t done = 0; done < size; done += kBlockSize) {
        make_noise(&state, kBlockSize);
        if (done / kBlockSize % 2 == 1)
            for (size_t at = 64; at < kBlockSize; ++at)
                buffer[at] = buffer[at % 64];
        memcpy(held + done, buffer, kBlockSize);
    }
    return 0;
}

static void serve(void) {
    char request[kLine] = "";
    int gpus = 0;
    unsigned percent = 0;
    unsigned long long seed = 0;
    size_t size = 0;
    FILE* file = fopen("request", "r");
    if (file == NULL || fgets(request, sizeof request, file) == NULL) {
        answer("error there is no request\n");
    } else if (strncmp(request, "load ", 5) == 0) {
        request[strcspn(request, "\n")] = '\0';
        FILE* layout = fopen(request + 5, "r");
        if (layout == NULL) {
            answer("error cannot open %s: %s\n", request + 5, strerror(errno));
        } else {
            if (follow(layout) == 0)
                answer("ok loaded\n");
            fclose(layout);
        }
    } else if (strcmp(request, "hash\n") == 0) {
        hash();
    } else if (sscanf(request, "spread %d %zu", &gpus, &size) == 2) {
        if (spread(gpus, size) == 0)
            answer("ok spread\n");
    } else if (sscanf(request, "hold %zu", &size) == 1) {
        if (hold(size) == 0)
            answer("ok held\n");
    } else if (sscanf(request, "change %u %llu", &percent, &seed) == 2) {
        change(percent, seed);
    } else if (strcmp(request, "watch\n") == 0) {
        watch.on = true;
        watch.last = watch.greatest = 0;
        touch();
        answer("ok watching\n");
    } else if (strcmp(request, "gap\n") == 0) {
        touch();
        watch.on = false;
        answer("ok %llu\n", (unsigned long long)watch.greatest);
    } else {
        answer("error unknown request\n");
    }
    if (file != NULL)
        fclose(file);
}

/* The others of the tree, before the driver is there: each in a folder of its own. */
static int fork_others(int tasks, bool own_gpus) {
    for (int task = 1; task < tasks; ++task) {
        char folder[32];
        snprintf(folder, sizeof folder, "task-%d", task);
        if (mkdir(folder, 0700) != 0 || (own_gpus && task >= kMaxGpus))
            return -1;
        const pid_t child = fork();
        home = child == 0 && own_gpus ? task : 0;
        if (child <= 0)
            return child < 0 ? -1 : chdir(folder);
    }
    return 0;
}

int main(int argc, char** argv) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    if (argc > 1 && fork_others(atoi(argv[1]), argc > 2 && strcmp(argv[2], "own") == 0) != 0)
        return 1;
    if (find_driver() != 0 || start_driver() != 0)
        return 1;
    answer("ok ready %d\n", (int)getpid());
    for (;;) {
        const struct timespec while_watching = {0, 500000};
        if (sigtimedwait(&signals, NULL, watch.on ? &while_watching : NULL) < 0) {
            if (watch.on)
                touch();
            continue;
        }
        buffer =
            mmap(NULL, kBufferSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (buffer == MAP_FAILED)
            return 1;
        serve();
        munmap(buffer, kBufferSize);
    }
}
