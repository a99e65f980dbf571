// SPDX-License-Identifier: Apache-2.0
/* Goes through the driver API, one area after the other, and says where something is not as it is
 * documented. Prints the areas, then "done".
 *
 *     api_exercise MODULE
 *
 * Wants one GPU of 256 MiB that nobody else uses.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

enum { kHeldMilliseconds = 1000 };

static CUdevice device;

static void before_init(void) {
    int number = 0;
    EXPECT(CUDA_ERROR_NOT_INITIALIZED, cuDeviceGetCount(&number));
    OK(cuDriverGetVersion(&number));
    TRUE(number >= 12080);
    const char* text = NULL;
    OK(cuGetErrorName(CUDA_ERROR_OUT_OF_MEMORY, &text));
    TRUE(!strcmp(text, "CUDA_ERROR_OUT_OF_MEMORY"));
    OK(cuGetErrorString(CUDA_ERROR_NOT_INITIALIZED, &text));
    TRUE(!strcmp(text, "initialization error"));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuGetErrorName((CUresult)12345, &text));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuInit(1));
    OK(cuInit(0));
    OK(cuInit(0));
}

static void devices(void) {
    int number = 0;
    char text[128];
    CUuuid uuid;
    size_t bytes = 0;
    OK(cuDeviceGetCount(&number));
    TRUE(number >= 1);
    EXPECT(CUDA_ERROR_INVALID_DEVICE, cuDeviceGet(&device, number));
    OK(cuDeviceGet(&device, 0));
    OK(cuDeviceGetName(text, sizeof text, device));
    TRUE(!strcmp(text, "gpustasis emulated GPU"));
    OK(cuDeviceGetUuid(&uuid, device));
    OK(cuDeviceTotalMem(&bytes, device));
    TRUE(bytes == 256 << 20);
    OK(cuDeviceGetAttribute(&number, CU_DEVICE_ATTRIBUTE_WARP_SIZE, device));
    TRUE(number == 32);
    OK(cuDeviceGetAttribute(&number, CU_DEVICE_ATTRIBUTE_MANAGED_MEMORY, device));
    TRUE(number == 0);
    OK(cuDeviceGetPCIBusId(text, sizeof text, device));
    CUdevice same = -1;
    OK(cuDeviceGetByPCIBusId(&same, text));
    TRUE(same == device);
}

static void contexts(void) {
    CUcontext primary, current, second;
    unsigned flags = 0;
    int active = -1;
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxSynchronize());
    OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
    TRUE(active == 0);
    OK(cuDevicePrimaryCtxRetain(&primary, device));
    OK(cuDevicePrimaryCtxGetState(device, &flags, &active));
    TRUE(active == 1);
    OK(cuCtxSetCurrent(primary));
    OK(cuCtxPushCurrent(primary));
    OK(cuCtxPopCurrent(&current));
    TRUE(current == primary);
    OK(cuCtxGetCurrent(&current));
    TRUE(current == primary);
#if CUDA_VERSION >= 13000
    OK(cuCtxCreate(&second, NULL, 0, device));
#else
    OK(cuCtxCreate(&second, 0, device));
#endif
    CUdeviceptr memory;
    size_t before = 0, after = 0, total = 0;
    OK(cuMemGetInfo(&before, &total));
    OK(cuMemAlloc(&memory, 32 << 20));
    OK(cuCtxDestroy(second)); /* and what was allocated in it */
    OK(cuCtxGetCurrent(&current));
    TRUE(current == primary);
    OK(cuMemGetInfo(&after, &total));
    TRUE(before == after);
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuCtxSetCurrent(second));
    CUdevice of_context = -1;
    OK(cuCtxGetDevice(&of_context));
    TRUE(of_context == device);
}

static void memory(void) {
    size_t free_before = 0, free_after = 0, total = 0;
    CUdeviceptr small[3], large, base;
    OK(cuMemGetInfo(&free_before, &total));
    TRUE(total == 256 << 20 && free_before == total);
    for (int i = 0; i < 3; ++i) {
        OK(cuMemAlloc(&small[i], 1000));
        TRUE(small[i] % 512 == 0);
    }
    OK(cuMemAlloc(&large, (100 << 20) + 1));
    OK(cuMemGetInfo(&free_after, &total));
    TRUE(free_before - free_after == (2 << 20) + (102 << 20)); /* counted in 2 MiB */
    OK(cuMemGetAddressRange(&base, &total, small[1] + 999));
    TRUE(base == small[1] && total >= 1000);
    EXPECT(CUDA_ERROR_OUT_OF_MEMORY, cuMemAlloc(&base, 200 << 20));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemAlloc(&base, 0));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFree(small[0] + 512 * 8));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD8(large + (100 << 20), 0, 2));
    for (int i = 0; i < 3; ++i)
        OK(cuMemFree(small[i]));
    OK(cuMemFree(large));
    OK(cuMemFree(0));
    OK(cuMemGetInfo(&free_after, &total));
    TRUE(free_after == free_before);
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuMemAllocManaged(&base, 1000, CU_MEM_ATTACH_GLOBAL));
}

static void copies(void) {
    enum { kSize = 3 << 20 };
    unsigned char* host = malloc(kSize);
    unsigned char* back = malloc(kSize);
    CUdeviceptr one, other;
    OK(cuMemAlloc(&one, kSize));
    OK(cuMemAlloc(&other, kSize));
    for (int i = 0; i < kSize; ++i)
        host[i] = (unsigned char)(i * 7 + i / 251);
    OK(cuMemcpyHtoD(one, host, kSize));
    OK(cuMemcpyDtoD(other, one, kSize));
    OK(cuMemcpy((CUdeviceptr)(uintptr_t)back, other, kSize));
    TRUE(!memcmp(host, back, kSize));
    OK(cuMemsetD16(other + 2, 0x1234, 3));
    OK(cuMemcpyDtoH(back, other, 10));
    TRUE(back[1] == host[1] && back[2] == 0x34 && back[7] == 0x12 && back[8] == host[8]);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemsetD32(other + 2, 0, 1));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemcpyHtoD(one + 1, host, kSize));

    CUDA_MEMCPY2D rows; /* 3 rows of 5 bytes, from pitch 8 at (1, 1) to pitch 6 at (0, 2) */
    memset(&rows, 0, sizeof rows);
    rows.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    rows.srcDevice = one;
    rows.srcPitch = 8;
    rows.srcXInBytes = 1;
    rows.srcY = 1;
    rows.dstMemoryType = CU_MEMORYTYPE_HOST;
    rows.dstHost = back;
    rows.dstPitch = 6;
    rows.dstY = 2;
    rows.WidthInBytes = 5;
    rows.Height = 3;
    OK(cuMemcpy2D(&rows));
    for (int y = 0; y < 3; ++y)
        TRUE(!memcmp(back + (y + 2) * 6, host + (y + 1) * 8 + 1, 5));
    rows.srcMemoryType = CU_MEMORYTYPE_ARRAY;
    EXPECT(CUDA_ERROR_NOT_SUPPORTED, cuMemcpy2D(&rows));
    OK(cuMemFree(one));
    OK(cuMemFree(other));
    free(host);
    free(back);
}

static void host_memory_and_pointers(void) {
    void* pinned;
    char* own = malloc(10000);
    CUdeviceptr on_device, other;
    CUmemorytype type;
    unsigned flags = 99;
    int ordinal = -1;
    OK(cuMemHostAlloc(&pinned, 5000, CU_MEMHOSTALLOC_PORTABLE));
    memset(pinned, 3, 5000);
    OK(cuMemHostGetFlags(&flags, pinned));
    TRUE(flags == CU_MEMHOSTALLOC_PORTABLE);
    OK(cuMemAlloc(&on_device, 5000));
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, on_device + 100));
    TRUE(type == CU_MEMORYTYPE_DEVICE);
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)pinned));
    TRUE(type == CU_MEMORYTYPE_HOST);
    OK(cuPointerGetAttribute(&ordinal, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL, on_device));
    TRUE(ordinal == 0);
    OK(cuPointerGetAttribute(&other, CU_POINTER_ATTRIBUTE_RANGE_START_ADDR, on_device + 100));
    TRUE(other == on_device);
    EXPECT(CUDA_ERROR_INVALID_VALUE,
           cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)own));
    OK(cuMemHostRegister(own, 10000, 0));
    EXPECT(CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED, cuMemHostRegister(own + 100, 10, 0));
    OK(cuPointerGetAttribute(&type, CU_POINTER_ATTRIBUTE_MEMORY_TYPE, (uintptr_t)own));
    TRUE(type == CU_MEMORYTYPE_HOST);
    OK(cuMemHostUnregister(own));
    EXPECT(CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED, cuMemHostUnregister(own));
    OK(cuMemFreeHost(pinned));
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuMemFreeHost(pinned));
    OK(cuMemFree(on_device));
    free(own);
}

/* For the kernel while_there_is: a process that ends a while after it is let go. */
struct Holder {
    pid_t pid;
    int end;
};

static struct Holder hold(void) {
    int ends[2];
    char byte;
    TRUE(signal(SIGCHLD, SIG_IGN) != SIG_ERR); /* who has ended is gone */
    TRUE(pipe(ends) == 0);
    const struct Holder holder = {fork(), ends[1]};
    TRUE(holder.pid >= 0);
    if (holder.pid == 0) {
        close(ends[1]);
        while (read(ends[0], &byte, 1) < 0)
            continue;
        usleep(kHeldMilliseconds * 1000);
        _exit(0);
    }
    close(ends[0]);
    return holder;
}

/* Once it is not registered any more, memory is its owner's to free: no copy into it is left to do. */
static void unregistered_under_a_copy(CUmodule module) {
    char* own = calloc(1, 10000);
    CUdeviceptr on_device;
    CUstream stream;
    CUfunction wait;
    struct Holder holder = hold();
    void* params[] = {&holder.pid};
    OK(cuModuleGetFunction(&wait, module, "while_there_is"));
    OK(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING));
    OK(cuMemAlloc(&on_device, 10000));
    OK(cuMemsetD8(on_device, 7, 10000));
    OK(cuMemHostRegister(own, 10000, 0));
    OK(cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
    OK(cuMemcpyDtoHAsync(own, on_device, 10000, stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    close(holder.end);
    OK(cuMemHostUnregister(own));
    TRUE(own[0] == 7 && own[9999] == 7);
    OK(cuStreamDestroy(stream));
    OK(cuMemFree(on_device));
    free(own);
}

static void count_call(void* count) {
    ++*(int*)count;
}

static void streams_and_events(CUmodule module) {
    CUstream stream;
    CUevent early, late;
    CUfunction wait, sleep;
    struct Holder holder = hold(); /* the stream is looked at meanwhile */
    int calls = 0;
    unsigned milliseconds = 2000;
    float elapsed = 0;
    void *hold_params[] = {&holder.pid}, *params[] = {&milliseconds};
    OK(cuModuleGetFunction(&wait, module, "while_there_is"));
    OK(cuModuleGetFunction(&sleep, module, "sleep_ms"));
    OK(cuStreamCreateWithPriority(&stream, CU_STREAM_NON_BLOCKING, -1));
    OK(cuEventCreate(&early, CU_EVENT_DEFAULT));
    OK(cuEventCreate(&late, CU_EVENT_DEFAULT));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventElapsedTime(&elapsed, early, late));
    OK(cuEventRecord(early, stream));
    OK(cuLaunchKernel(wait, 1, 1, 1, 1, 1, 1, 0, stream, hold_params, NULL));
    OK(cuLaunchKernel(sleep, 1, 1, 1, 1, 1, 1, 0, stream, params, NULL));
    OK(cuEventRecord(late, stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuStreamQuery(stream));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventQuery(late));
    EXPECT(CUDA_ERROR_NOT_READY, cuEventElapsedTime(&elapsed, early, late));
    OK(cuLaunchHostFunc(stream, count_call, &calls));
    close(holder.end);
    OK(cuStreamSynchronize(stream));
    TRUE(calls == 1);
    OK(cuStreamQuery(stream));
    OK(cuEventQuery(late));
    OK(cuEventElapsedTime(&elapsed, early, late));
    TRUE(elapsed >= kHeldMilliseconds + 2000 && elapsed < 60000);
    OK(cuStreamDestroy(stream));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuStreamSynchronize(stream));
    OK(cuEventDestroy(early));
    OK(cuEventDestroy(late));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuEventQuery(late));
}

static void kernels(CUmodule module) {
    CUfunction where, gather, missing;
    CUdeviceptr out;
    unsigned long long found[2 * 3 * 2 * 4 * 2 * 3];
    double number = 0;
    struct {
        char letter;
        double number;
    } odd = {4, 0.25};
    char a = 1, e = 5;
    short b = 2;
    int c = 3;
    double f = 0.5;
    EXPECT(CUDA_ERROR_NOT_FOUND, cuModuleGetFunction(&missing, module, "missing"));
    OK(cuModuleGetFunction(&where, module, "where"));
    OK(cuModuleGetFunction(&gather, module, "gather"));
    OK(cuMemAlloc(&out, sizeof found));
    OK(cuMemsetD8(out, 0, sizeof found));
    void* where_params[] = {&out};
    OK(cuLaunchKernel(where, 2, 3, 2, 4, 2, 3, 0, NULL, where_params, NULL));
    OK(cuMemcpyDtoH(found, out, sizeof found));
    for (int i = 0; i < 12 * 24; ++i)
        TRUE(found[i] == (unsigned long long)(i / 24 * 1000 + i % 24 + 1));
    void* gather_params[] = {&out, &a, &b, &c, &odd, &e, &f};
    OK(cuLaunchKernel(gather, 1, 1, 1, 1, 1, 1, 0, NULL, gather_params, NULL));
    OK(cuMemcpyDtoH(&number, out, sizeof number));
    TRUE(number == 54321.75);
    EXPECT(CUDA_ERROR_INVALID_VALUE,
           cuLaunchKernel(where, 0, 1, 1, 1, 1, 1, 0, NULL, where_params, NULL));
    EXPECT(CUDA_ERROR_INVALID_VALUE,
           cuLaunchKernel(where, 1, 1, 1, 1024, 2, 1, 0, NULL, where_params, NULL));
    size_t size = sizeof out;
    void* extra[] = {CU_LAUNCH_PARAM_BUFFER_POINTER, &out, CU_LAUNCH_PARAM_BUFFER_SIZE, &size,
                     CU_LAUNCH_PARAM_END};
    OK(cuMemsetD8(out, 0, sizeof found));
    OK(cuLaunchKernel(where, 1, 1, 1, 2, 1, 1, 0, NULL, NULL, extra));
    OK(cuMemcpyDtoH(found, out, 16));
    TRUE(found[0] == 1 && found[1] == 2);
    OK(cuMemFree(out));

    CUmodule bad;
    char text[128] = "not an image";
    EXPECT(CUDA_ERROR_INVALID_IMAGE, cuModuleLoadData(&bad, text));
    strcpy(text, ".version 8.0\n.target sm_80\n");
    EXPECT(CUDA_ERROR_INVALID_PTX, cuModuleLoadData(&bad, text));
    memcpy(text, "\x50\xed\x55\xba", 4);
    EXPECT(CUDA_ERROR_NO_BINARY_FOR_GPU, cuModuleLoadData(&bad, text));
    EXPECT(CUDA_ERROR_FILE_NOT_FOUND, cuModuleLoad(&bad, "/nonexistent"));
}

static void entry_points(void) {
    void* found = NULL;
    CUdriverProcAddressQueryResult status;
    int version = 0;
    OK(cuDriverGetVersion(&version));
    OK(cuGetProcAddress("cuMemAlloc", &found, 12080, 0, &status));
    TRUE(found == dlsym(RTLD_DEFAULT, "cuMemAlloc_v2") && status == 0);
    OK(cuGetProcAddress("cuMemAlloc", &found, 2000, 0, &status));
    TRUE(found == dlsym(RTLD_DEFAULT, "cuMemAlloc"));
    OK(cuGetProcAddress("cuMemAlloc_v2", &found, 12080, 0, &status));
    TRUE(found == NULL && status == CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND);
    OK(cuGetProcAddress("cuCheckpointProcessLock", &found, 12000, 0, &status));
    TRUE(found == NULL && status == CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT);
    EXPECT(CUDA_ERROR_INVALID_VALUE, cuGetProcAddress("cuInit", &found, version + 10, 0, &status));
    /* The names without _v2 are another, older interface. */
    CUresult (*legacy)(void*, CUdeviceptr, size_t) =
        (CUresult(*)(void*, CUdeviceptr, size_t))dlsym(RTLD_DEFAULT, "cuMemcpyDtoH");
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, legacy(NULL, 0, 0));
    const CUuuid none = {{0}};
    const void* table = NULL;
    EXPECT(CUDA_ERROR_NOT_FOUND, cuGetExportTable(&table, &none));
}

int main(int argc, char** argv) {
    TRUE(argc == 2);
    setvbuf(stdout, NULL, _IOLBF, 0);
    CUmodule module;
    before_init(), puts("initialised");
    devices(), puts("devices");
    contexts(), puts("contexts");
    memory(), puts("memory");
    copies(), puts("copies");
    host_memory_and_pointers(), puts("host memory");
    OK(cuModuleLoad(&module, argv[1]));
    unregistered_under_a_copy(module), puts("registered memory");
    streams_and_events(module), puts("streams");
    kernels(module), puts("kernels");
    OK(cuModuleUnload(module));
    EXPECT(CUDA_ERROR_INVALID_HANDLE, cuModuleUnload(module));
    entry_points(), puts("entry points");
    OK(cuDevicePrimaryCtxRelease(device));
    EXPECT(CUDA_ERROR_INVALID_CONTEXT, cuDevicePrimaryCtxRelease(device));
    puts("done");
    return 0;
}
