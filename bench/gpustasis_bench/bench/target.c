/* Holds GPU memory and little else: the process that the benchmark dumps and restores.
 *
 *     target            in a folder of its own, which is its working directory
 *
 * It writes "ok ready" to the file `answer`. Then, at each SIGUSR1, it does what the file `request`
 * says and writes a new `answer`, "ok ..." or "error ...":
 *
 *     load LAYOUT       allocate the layout's segments, if that was not done, and copy its bytes
 *     hash              answer with a hash of all segments, read back from the GPU
 *
 * It keeps no file open and no buffer between requests, so that nearly all it has is on the GPU.
 * Layouts: content.py. Needs libcuda.so.1 when it runs, nothing of CUDA to be
 * compiled.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
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

enum { kBufferSize = 4 << 20, kMaxSegments = 1 << 16, kLine = 4200 };

static struct {
    device_pointer address;
    size_t size;
} segments[kMaxSegments];
static size_t segment_count;
static char* buffer;

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

static int start_driver(void) {
    int device = 0;
    void* context = NULL;
    TRY(cu_init(0));
    TRY(cu_device_get(&device, 0));
    TRY(cu_primary_context(&context, device));
    TRY(cu_set_current(context));
    return 0;
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
    segments[segment_count++].size = size;
    return 0;
}

static int follow(FILE* layout) {
    char line[kLine];
    int file = -1;
    int result = 0;
    size_t seen = 0;
    size_t segment = 0, offset = 0, size = 0;
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

static uint64_t rotate(uint64_t value, int bits) {
    return value << bits | value >> (64 - bits);
}

/* The rounds of XXH64 over whole blocks of 32 bytes; segments are multiples of 2 MiB. */
static void add_to_hash(uint64_t lanes[4], const char* bytes, size_t size) {
    for (size_t at = 0; at + 32 <= size; at += 32) {
        for (int lane = 0; lane < 4; ++lane) {
            uint64_t word;
            memcpy(&word, bytes + at + 8 * (size_t)lane, 8);
            lanes[lane] =
                rotate(lanes[lane] + word * 0xC2B2AE3D27D4EB4Fu, 31) * 0x9E3779B185EBCA87u;
        }
    }
}

static int hash(void) {
    uint64_t lanes[4] = {1, 2, 3, 4};
    size_t total = 0;
    for (size_t i = 0; i < segment_count; ++i) {
        for (size_t done = 0; done < segments[i].size;) {
            const size_t left = segments[i].size - done;
            const size_t size = left < kBufferSize ? left : kBufferSize;
            TRY(cu_to_host(buffer, segments[i].address + done, size));
            add_to_hash(lanes, buffer, size);
            done += size;
        }
        total += segments[i].size;
    }
    answer("ok %016llx%016llx%016llx%016llx %zu\n", (unsigned long long)lanes[0],
           (unsigned long long)lanes[1], (unsigned long long)lanes[2], (unsigned long long)lanes[3],
           total);
    return 0;
}

static void serve(void) {
    char request[kLine] = "";
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
    } else {
        answer("error unknown request\n");
    }
    if (file != NULL)
        fclose(file);
}

int main(void) {
    sigset_t signals;
    sigemptyset(&signals);
    sigaddset(&signals, SIGUSR1);
    sigprocmask(SIG_BLOCK, &signals, NULL);
    if (find_driver() != 0 || start_driver() != 0)
        return 1;
    answer("ok ready\n");
    for (;;) {
        int signal = 0;
        sigwait(&signals, &signal);
        buffer =
            mmap(NULL, kBufferSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (buffer == MAP_FAILED)
            return 1;
        serve();
        munmap(buffer, kBufferSize);
    }
}
