// SPDX-License-Identifier: Apache-2.0
/* A job with markers wherever a process can have them: what a sealed checkpoint must show nobody.
 *
 *     MARKED=TEXT marked_job --argument TEXT [--cuda 0] [--plain-children N]
 *
 * Both texts are 32 bytes: markers themselves. More are made of the first: tests/campaigns/markers.py makes the
 * same ones. They lie in private memory, in memory that processes share, in a pipe, in a file without a name and,
 * unless told otherwise, in the first process's GPU memory; nowhere else in the clear. Each process has N
 * children without CUDA. It checks all of them at every step and prints "PID step K ok", or says what is wrong
 * and ends with status 1.
 */
#define _GNU_SOURCE
#include <cuda.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { kMarker = 32, kPage = 4096, kStepMicroseconds = 20000, kGpuPages = 256 };
enum { kMemoryPages = 256, kSharedPages = 256, kFilePages = 4 };
enum kind { kMemory = 1, kShared, kPipe, kFile, kGpu };

static void fail(const char* what) {
    printf("%d WRONG: %s\n", (int)getpid(), what);
    fflush(stdout);
    _exit(1);
}

static void require(bool right, const char* what) {
    if (!right)
        fail(what);
}

static void derive(uint8_t* marker, const char* text, enum kind kind) {
    for (int i = 0; i < kMarker; ++i)
        marker[i] = (uint8_t)(text[i * 7 % kMarker] ^ (0x90 + kind));
}

static uint64_t next_random(uint64_t* state) {
    *state ^= *state << 13, *state ^= *state >> 7, *state ^= *state << 17;
    return *state;
}

/* Noise, which no codec makes smaller, with a marker in each page, at another place in each. */
static void fill(uint8_t* pages, size_t count, const char* text, enum kind kind) {
    uint64_t state = 88172645463325252u + kind;
    for (size_t at = 0; at < count * kPage; at += 8) {
        const uint64_t word = next_random(&state);
        memcpy(pages + at, &word, 8);
    }
    for (size_t page = 0; page < count; ++page)
        derive(pages + page * kPage + page * 61 % (kPage - kMarker), text, kind);
}

static void check(const uint8_t* pages, size_t count, const char* text, enum kind kind) {
    static uint8_t wanted[kGpuPages * kPage];
    uint64_t state = 88172645463325252u + kind;
    for (size_t page = 0; page < count; ++page) {
        for (size_t at = 0; at < kPage; at += 8) {
            const uint64_t word = next_random(&state);
            memcpy(wanted + at, &word, 8);
        }
        derive(wanted + page * 61 % (kPage - kMarker), text, kind);
        require(memcmp(wanted, pages + page * kPage, kPage) == 0, "memory");
    }
    memset(wanted, 0, sizeof wanted);
}

static CUdeviceptr make_gpu_memory(const char* text) {
    const size_t size = (size_t)kGpuPages * kPage;
    CUdevice device;
    CUcontext context;
    CUdeviceptr memory;
    require(cuInit(0) == CUDA_SUCCESS && cuDeviceGet(&device, 0) == CUDA_SUCCESS, "cuInit");
    require(cuDevicePrimaryCtxRetain(&context, device) == CUDA_SUCCESS, "a context");
    require(cuCtxSetCurrent(context) == CUDA_SUCCESS, "a context");
    require(cuMemAlloc(&memory, size) == CUDA_SUCCESS, "cuMemAlloc");
    uint8_t* host = malloc(size);
    require(host != NULL, "malloc");
    fill(host, kGpuPages, text, kGpu);
    require(cuMemcpyHtoD(memory, host, size) == CUDA_SUCCESS, "cuMemcpyHtoD");
    memset(host, 0, size);
    free(host);
    return memory;
}

/* The host has a copy of it no longer than this takes. */
static void check_gpu_memory(CUdeviceptr memory, const char* text) {
    static uint8_t found[kGpuPages * kPage];
    require(cuMemcpyDtoH(found, memory, sizeof found) == CUDA_SUCCESS, "cuMemcpyDtoH");
    check(found, kGpuPages, text, kGpu);
    memset(found, 0, sizeof found);
}

static void* map(size_t pages, int flags) {
    void* memory = mmap(NULL, pages * kPage, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0);
    require(memory != MAP_FAILED, "mmap");
    return memory;
}

static int make_file(const char* text) {
    char name[] = "marked-XXXXXX";
    uint8_t* pages = map(kFilePages, MAP_PRIVATE);
    const int file = memfd_create(name, 0);
    fill(pages, kFilePages, text, kFile);
    require(file >= 0 && write(file, pages, kFilePages * kPage) == kFilePages * kPage, "memfd");
    munmap(pages, kFilePages * kPage);
    return file;
}

static void check_file(int file, const char* text) {
    static uint8_t found[kFilePages * kPage];
    require(pread(file, found, sizeof found, 0) == sizeof found, "memfd");
    check(found, kFilePages, text, kFile);
    memset(found, 0, sizeof found);
}

/* The marker is taken out and put back. */
static void check_pipe(const int* ends, const char* text) {
    uint8_t found[kMarker], wanted[kMarker];
    derive(wanted, text, kPipe);
    require(read(ends[0], found, kMarker) == kMarker && memcmp(found, wanted, kMarker) == 0,
            "pipe");
    require(write(ends[1], found, kMarker) == kMarker, "pipe");
}

int main(int argc, char** argv) {
    const char *text = NULL, *environment = getenv("MARKED");
    unsigned long children = 0;
    bool cuda = true;
    for (int i = 1; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--argument") == 0)
            text = argv[i + 1];
        else if (strcmp(argv[i], "--cuda") == 0)
            cuda = strtoul(argv[i + 1], NULL, 10) != 0;
        else if (strcmp(argv[i], "--plain-children") == 0)
            children = strtoul(argv[i + 1], NULL, 10);
        else
            fail(argv[i]);
    }
    require(text != NULL && strlen(text) == kMarker, "--argument is not 32 bytes long");
    require(environment != NULL && strlen(environment) == kMarker, "MARKED is not 32 bytes long");
    uint8_t* shared = map(kSharedPages, MAP_SHARED);
    fill(shared, kSharedPages, text, kShared);
    const int file = make_file(text);
    bool is_child = false;
    for (unsigned long child = 0; child < children && !is_child; ++child) {
        const pid_t parent = getpid(), pid = fork();
        require(pid >= 0, "fork");
        is_child = pid == 0;
        if (is_child)
            require(prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0) == 0 && getppid() == parent,
                    "parent");
    }
    int ends[2];
    uint8_t marker[kMarker];
    derive(marker, text, kPipe);
    require(pipe(ends) == 0 && write(ends[1], marker, kMarker) == kMarker, "pipe");
    uint8_t* memory = map(kMemoryPages, MAP_PRIVATE);
    fill(memory, kMemoryPages, text, kMemory);
    const bool has_gpu = cuda && !is_child;
    const CUdeviceptr gpu = has_gpu ? make_gpu_memory(text) : 0;
    for (unsigned long step = 0;; ++step) {
        check(memory, kMemoryPages, text, kMemory);
        check(shared, kSharedPages, text, kShared);
        check_file(file, text);
        check_pipe(ends, text);
        if (has_gpu)
            check_gpu_memory(gpu, text);
        char line[64];
        const int length = snprintf(line, sizeof line, "%d step %lu ok\n", (int)getpid(), step);
        require(write(STDOUT_FILENO, line, (size_t)length) == length, "stdout");
        usleep(kStepMicroseconds);
    }
}
