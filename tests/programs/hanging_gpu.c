// SPDX-License-Identifier: Apache-2.0
// A CUDA driver and an NVML in one library, with one GPU. The calls that the variable HANGS names,
// with blanks between them, never return.
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int answer(const char* call) {
    const char* named = getenv("HANGS");
    const char* place = named != NULL ? strstr(named, call) : NULL;
    if (place != NULL && (place[strlen(call)] == ' ' || place[strlen(call)] == '\0')) {
        for (;;) {
            pause();
        }
    }
    return 0;
}

int cuInit(unsigned int flags) {
    (void)flags;
    return answer("cuInit");
}

int cuDriverGetVersion(int* version) {
    *version = 13000;
    return answer("cuDriverGetVersion");
}

int cuGetErrorName(int error, const char** text) {
    (void)error;
    *text = "CUDA_ERROR";
    return 0;
}

int cuGetErrorString(int error, const char** text) {
    (void)error;
    *text = "an error";
    return 0;
}

int cuDeviceGetCount(int* count) {
    *count = 1;
    return answer("cuDeviceGetCount");
}

int cuDeviceGet(int* device, int ordinal) {
    *device = ordinal;
    return 0;
}

int cuDeviceGetName(char* name, int size, int device) {
    (void)device;
    strncpy(name, "a GPU", (size_t)size);
    return 0;
}

int cuDeviceGetUuid_v2(void* uuid, int device) {
    (void)device;
    memset(uuid, 7, 16);
    return 0;
}

int cuDeviceTotalMem_v2(size_t* bytes, int device) {
    (void)device;
    *bytes = (size_t)64 << 30;
    return 0;
}

int cuCheckpointProcessGetRestoreThreadId(int pid, int* tid) {
    *tid = pid;
    return answer("cuCheckpointProcessGetRestoreThreadId");
}

int cuCheckpointProcessGetState(int pid, int* state) {
    (void)pid;
    *state = 0;
    return answer("cuCheckpointProcessGetState");
}

int cuCheckpointProcessLock(int pid, void* args) {
    (void)pid;
    (void)args;
    return 304;
}

int nvmlInit_v2(void) {
    return answer("nvmlInit_v2");
}

int nvmlShutdown(void) {
    return 0;
}

int nvmlSystemGetDriverVersion(char* version, unsigned int length) {
    strncpy(version, "580.95.05", length);
    return answer("nvmlSystemGetDriverVersion");
}

int nvmlDeviceGetCount_v2(unsigned int* count) {
    *count = 0;
    return answer("nvmlDeviceGetCount_v2");
}
