// SPDX-License-Identifier: Apache-2.0
/* A caller of custom storage (CUDA 13.4) that is told what to do, line by line, and answers each line
 * with one of its own: first the CUresult, then values.
 *
 *     custom_storage GPUS       retains the primary contexts of the first GPUS; -1: no cuInit
 *
 *     checkpoint PID            begins; answers CODE OPERATION DEVICES
 *     restore PID [OLD NEW]...  the same
 *     entry OPERATION I         answers CODE GPU BYTES POINTER_CONTEXT MEMORY_TYPE RANGE_BYTES
 *     save OPERATION            copies all memory to the host, kept until the program ends
 *     load OPERATION FROM [1]   copies what was saved of operation FROM, GPU by GPU in order; 1: in the
 *                               opposite one
 *     look OPERATION I OFFSET   answers CODE BYTE
 *     fill OPERATION I VALUE    by cuMemsetD8Async
 *     sync OPERATION I          waits for the entry's stream
 *     complete OPERATION        answers CODE
 *     stale OPERATION I         copies from where a mapping was
 *     free OPERATION I          answers what cuMemFree says
 *     copy OPERATION WAY N      copies all memory, that of each GPU with N threads, each with a stream,
 *                               a pinned buffer and an event of its own. WAY: down, up (zeros) or both
 *                               (what was there). Answers CODE MILLISECONDS
 *     pending OPERATION         whether an event behind a copy that is not done says so, and holds up
 *                               another stream; the copy goes on
 *     events OPERATION          the same once the copy is done. Answers CODE MILLISECONDS BYTE, the last
 *                               one copied; meanwhile the other stream has written 0x77 to all
 *     capture OPERATION I       has the entry's stream capture
 *     many PID...               a checkpoint and a restore of each, from a thread each; answers CODE
 *     lock, unlock, state, hostcheckpoint, hostrestore PID
 */
#include "check.h"

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#include <time.h>

#define MAX 64

struct Operation {
    CUcheckpointOperationHandle handle;
    unsigned count;
    CUcheckpointCustomStoragePerDeviceData devices[16];
    unsigned char* saved[16];
};

static struct Operation operations[MAX];
static int operation_count;
static CUcontext contexts[16];

static int remember(const CUcheckpointCustomStorageInfo* info) {
    struct Operation* operation = &operations[operation_count];
    operation->handle = info->handle;
    operation->count = info->deviceCount;
    memcpy(operation->devices, info->perDeviceData,
           info->deviceCount * sizeof *info->perDeviceData);
    return operation_count++;
}

static CUresult begin(const char* call, int pid, char** words, int count,
                      CUcheckpointCustomStorageInfo** info) {
    CUcheckpointGpuPair pairs[16];
    if (!strcmp(call, "checkpoint")) {
        CUcheckpointCheckpointArgs args = {.customStorageInfo_out = info};
        return cuCheckpointProcessCheckpoint(pid, &args);
    }
    CUcheckpointRestoreArgs args = {.customStorageInfo_out = info};
    for (int i = 0; i + 1 < count; i += 2) {
        CUcheckpointGpuPair* pair = &pairs[i / 2];
        CUuuid* uuids[] = {&pair->oldUuid, &pair->newUuid};
        for (int side = 0; side < 2; ++side) {
            for (int byte = 0; byte < 16; ++byte) {
                unsigned value = 0;
                TRUE(sscanf(words[i + side] + 2 * byte, "%2x", &value) == 1);
                uuids[side]->bytes[byte] = (char)value;
            }
        }
        args.gpuPairs = pairs;
        args.gpuPairsCount = (unsigned)(i / 2 + 1);
    }
    return cuCheckpointProcessRestore(pid, &args);
}

static void entry(const CUcheckpointCustomStoragePerDeviceData* device) {
    CUcontext of_stream = NULL;
    CUcontext of_pointer = contexts[0];
    CUdevice gpu = -1;
    CUdevice by_stream = -2;
    unsigned type = 0;
    size_t range = 0;
    OK(cuStreamGetCtx(device->stream, &of_stream));
    OK(cuCtxPushCurrent(of_stream));
    OK(cuCtxGetDevice(&gpu));
    OK(cuCtxPopCurrent(NULL));
    OK(cuStreamGetDevice(device->stream, &by_stream));
    TRUE(gpu == by_stream);
    TRUE(contexts[gpu] == of_stream);
    OK(cuPointerGetAttribute(&of_pointer, CU_POINTER_ATTRIBUTE_CONTEXT, device->devPtr));
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, device->devPtr));
    OK(cuPointerGetAttribute(&range, CU_POINTER_ATTRIBUTE_RANGE_SIZE, device->devPtr));
    printf("0 %d %zu %d %u %zu\n", (int)gpu, device->size, of_pointer != NULL, type, range);
}

static double now_ms(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec * 1e3 + (double)time.tv_nsec / 1e6;
}

/* A part of one GPU's memory, copied by a thread of its own. */
struct Part {
    pthread_t thread;
    CUdeviceptr device;
    size_t size;
    CUcontext context;
    int down, up;
};

static void* copy_part(void* argument) {
    const struct Part* part = argument;
    void* host = NULL;
    CUstream stream;
    CUevent event;
    OK(cuCtxSetCurrent(part->context));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING));
    OK(cuMemHostAlloc(&host, part->size, 0));
    if (part->down)
        OK(cuMemcpyDtoHAsync(host, part->device, part->size, stream));
    if (part->up)
        OK(cuMemcpyHtoDAsync(part->device, host, part->size, stream));
    OK(cuEventRecord(event, stream));
    OK(cuEventSynchronize(event));
    OK(cuEventQuery(event));
    OK(cuEventDestroy(event));
    OK(cuStreamSynchronize(stream));
    OK(cuStreamDestroy(stream));
    OK(cuMemFreeHost(host));
    return NULL;
}

static void copy(const struct Operation* operation, const char* way, unsigned threads) {
    static struct Part parts[256];
    unsigned count = 0;
    const double start = now_ms();
    for (unsigned i = 0; i < operation->count; ++i) {
        const size_t size = operation->devices[i].size / threads;
        CUdevice gpu = 0;
        OK(cuStreamGetDevice(operation->devices[i].stream, &gpu));
        for (unsigned j = 0; j < threads; ++j) {
            struct Part* part = &parts[count++];
            part->device = operation->devices[i].devPtr + j * size;
            part->size = size;
            part->context = contexts[gpu];
            part->down = strcmp(way, "up") != 0;
            part->up = strcmp(way, "down") != 0;
            TRUE(pthread_create(&part->thread, NULL, copy_part, part) == 0);
        }
    }
    for (unsigned i = 0; i < count; ++i) {
        TRUE(pthread_join(parts[i].thread, NULL) == 0);
    }
    printf("0 %d\n", (int)(now_ms() - start));
}

/* A copy, an event behind it, and a stream that waits for the event. */
struct Race {
    CUstream other;
    CUevent before, after;
    void* host;
};

static struct Race start_race(const CUcheckpointCustomStoragePerDeviceData* device) {
    struct Race race;
    OK(cuMemHostAlloc(&race.host, device->size, 0));
    OK(cuStreamCreate(&race.other, CU_STREAM_NON_BLOCKING));
    OK(cuEventCreate(&race.before, 0));
    OK(cuEventCreate(&race.after, 0));
    OK(cuEventRecord(race.before, device->stream));
    OK(cuMemcpyDtoHAsync(race.host, device->devPtr, device->size, device->stream));
    OK(cuEventRecord(race.after, device->stream));
    return race;
}

static void pending(const struct Operation* operation) {
    const CUcheckpointCustomStoragePerDeviceData* device = &operation->devices[0];
    const struct Race race = start_race(device);
    float milliseconds = 0;
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(race.after));
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(device->stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&milliseconds, race.before, race.after));
    OK(cuStreamQuery(race.other));
    OK(cuStreamWaitEvent(race.other, race.after, 0));
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(race.other));
    printf("0\n");
}

static void events(const struct Operation* operation) {
    const CUcheckpointCustomStoragePerDeviceData* device = &operation->devices[0];
    const struct Race race = start_race(device);
    unsigned char last = 0;
    float milliseconds = 0;
    OK(cuStreamWaitEvent(race.other, race.after, 0));
    OK(cuMemsetD8Async(device->devPtr, 0x77, device->size, race.other));
    OK(cuStreamSynchronize(race.other));
    OK(cuEventQuery(race.after));
    OK(cuEventElapsedTime(&milliseconds, race.before, race.after));
    last = ((unsigned char*)race.host)[device->size - 1];
    OK(cuMemFreeHost(race.host));
    OK(cuStreamDestroy(race.other));
    OK(cuEventDestroy(race.before));
    OK(cuEventDestroy(race.after));
    printf("0 %d %u\n", (int)milliseconds, last);
}

/* Whole cycles of several targets at once. */
struct Cycle {
    pthread_t thread;
    int pid;
};

static void* run_cycle(void* argument) {
    const struct Cycle* cycle = argument;
    CUcheckpointCustomStorageInfo* info = NULL;
    static __thread unsigned char* saved[16];
    OK(cuCtxSetCurrent(contexts[0]));
    OK(cuCheckpointProcessLock(cycle->pid, NULL));
    for (int restoring = 0; restoring < 2; ++restoring) {
        OK(begin(restoring ? "restore" : "checkpoint", cycle->pid, NULL, 0, &info));
        for (unsigned i = 0; i < info->deviceCount; ++i) {
            const CUcheckpointCustomStoragePerDeviceData* device = &info->perDeviceData[i];
            if (restoring) {
                OK(cuMemcpyHtoDAsync(device->devPtr, saved[i], device->size, device->stream));
            } else {
                OK(cuMemAllocHost((void**)&saved[i], device->size));
                OK(cuMemcpyDtoHAsync(saved[i], device->devPtr, device->size, device->stream));
            }
        }
        OK(cuCheckpointOperationComplete(info->handle));
    }
    OK(cuCheckpointProcessUnlock(cycle->pid, NULL));
    return NULL;
}

static void many(char** words, int count) {
    static struct Cycle cycles[40];
    for (int i = 0; i < count; ++i) {
        cycles[i].pid = atoi(words[i]);
        TRUE(pthread_create(&cycles[i].thread, NULL, run_cycle, &cycles[i]) == 0);
    }
    for (int i = 0; i < count; ++i) {
        TRUE(pthread_join(cycles[i].thread, NULL) == 0);
    }
    printf("0\n");
}

int main(int argc, char** argv) {
    static char line[4096];
    const int gpus = argc > 1 ? atoi(argv[1]) : 1;
    if (gpus >= 0) {
        OK(cuInit(0));
        for (int i = 0; i < gpus; ++i) {
            OK(cuDevicePrimaryCtxRetain(&contexts[i], i));
        }
        if (gpus > 0) {
            OK(cuCtxSetCurrent(contexts[0]));
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("ready\n");
    while (fgets(line, sizeof line, stdin)) {
        char* words[40] = {0};
        int count = 0;
        for (char* at = strtok(line, " \n"); at && count < 40; at = strtok(NULL, " \n")) {
            words[count++] = at;
        }
        TRUE(count > 1);
        const char* call = words[0];
        const int number = atoi(words[1]);
        struct Operation* operation = &operations[number & (MAX - 1)];
        const int index = count > 2 ? atoi(words[2]) : 0;
        CUcheckpointCustomStoragePerDeviceData* device = &operation->devices[index & 15];
        CUresult result = CUDA_SUCCESS;
        if (!strcmp(call, "checkpoint") || !strcmp(call, "restore")) {
            CUcheckpointCustomStorageInfo* info = NULL;
            result = begin(call, number, words + 2, count - 2, &info);
            TRUE((info != NULL) == (result == CUDA_SUCCESS));
            const unsigned devices = info ? info->deviceCount : 0;
            printf("%d %d %u\n", (int)result, info ? remember(info) : -1, devices);
        } else if (!strcmp(call, "entry")) {
            entry(device);
        } else if (!strcmp(call, "save")) {
            for (unsigned i = 0; i < operation->count && result == CUDA_SUCCESS; ++i) {
                device = &operation->devices[i];
                OK(cuMemAllocHost((void**)&operation->saved[i], device->size));
                result = cuMemcpyDtoHAsync(operation->saved[i], device->devPtr, device->size,
                                           device->stream);
            }
            printf("%d\n", (int)result);
        } else if (!strcmp(call, "load")) {
            for (unsigned i = 0; i < operation->count && result == CUDA_SUCCESS; ++i) {
                const int turned = count > 3 && atoi(words[3]);
                device = &operation->devices[turned ? operation->count - 1 - i : i];
                result = cuMemcpyHtoDAsync(device->devPtr, operations[index].saved[i], device->size,
                                           device->stream);
            }
            printf("%d\n", (int)result);
        } else if (!strcmp(call, "look")) {
            unsigned char byte = 0;
            result = cuMemcpyDtoH(&byte, device->devPtr + strtoull(words[3], NULL, 10), 1);
            printf("%d %u\n", (int)result, byte);
        } else if (!strcmp(call, "fill")) {
            const int value = atoi(words[3]);
            result =
                cuMemsetD8Async(device->devPtr, (unsigned char)value, device->size, device->stream);
            printf("%d\n", (int)result);
        } else if (!strcmp(call, "sync")) {
            printf("%d\n", (int)cuStreamSynchronize(device->stream));
        } else if (!strcmp(call, "complete")) {
            printf("%d\n", (int)cuCheckpointOperationComplete(operation->handle));
        } else if (!strcmp(call, "stale")) {
            unsigned char byte = 0;
            printf("%d\n", (int)cuMemcpyDtoH(&byte, device->devPtr, 1));
        } else if (!strcmp(call, "free")) {
            printf("%d\n", (int)cuMemFree(device->devPtr));
        } else if (!strcmp(call, "copy")) {
            copy(operation, words[2], (unsigned)atoi(words[3]));
        } else if (!strcmp(call, "pending")) {
            pending(operation);
        } else if (!strcmp(call, "events")) {
            events(operation);
        } else if (!strcmp(call, "capture")) {
            CUgraph graph;
            CUstreamCaptureStatus status = 0;
            OK(cuStreamBeginCapture(device->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
            OK(cuStreamEndCapture(device->stream, &graph));
            OK(cuGraphDestroy(graph));
            OK(cuStreamBeginCapture(device->stream, CU_STREAM_CAPTURE_MODE_RELAXED));
            OK(cuStreamIsCapturing(device->stream, &status));
            TRUE(status == CU_STREAM_CAPTURE_STATUS_ACTIVE);
            EXPECT(CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED,
                   cuMemsetD8Async(device->devPtr, 0, 1, device->stream));
            EXPECT(CUDA_ERROR_STREAM_CAPTURE_INVALIDATED,
                   cuStreamEndCapture(device->stream, &graph));
            printf("%d\n", (int)cuStreamBeginCapture(device->stream, 0));
        } else if (!strcmp(call, "many")) {
            many(words + 1, count - 1);
        } else if (!strcmp(call, "hostcheckpoint")) {
            printf("%d\n", (int)cuCheckpointProcessCheckpoint(number, NULL));
        } else if (!strcmp(call, "hostrestore")) {
            printf("%d\n", (int)cuCheckpointProcessRestore(number, NULL));
        } else if (!strcmp(call, "lock")) {
            printf("%d\n", (int)cuCheckpointProcessLock(number, NULL));
        } else if (!strcmp(call, "unlock")) {
            printf("%d\n", (int)cuCheckpointProcessUnlock(number, NULL));
        } else if (!strcmp(call, "state")) {
            CUprocessState state = 0;
            result = cuCheckpointProcessGetState(number, &state);
            printf("%d %d\n", (int)result, (int)state);
        } else {
            printf("-1\n");
        }
    }
    return 0;
}
