// SPDX-License-Identifier: Apache-2.0
/* Says what driver this is, by the driver API and by NVML, and whether it has 13.4's entry point. */
#define _GNU_SOURCE
#include "check.h"

#include <dlfcn.h>
#include <string.h>

#define NEWEST "cuCheckpointOperationComplete"

static const char* presence(const void* entry) {
    return entry ? "there" : "missing";
}

int main(void) {
    int version = 0;
    OK(cuInit(0));
    OK(cuDriverGetVersion(&version));
    printf("driver %d\n", version);

    void* found = NULL;
    CUdriverProcAddressQueryResult status = 0;
    const int result = (int)cuGetProcAddress(NEWEST, &found, 13040, 0, &status);
    EXPECT(version < 13040 ? CUDA_ERROR_INVALID_VALUE : CUDA_SUCCESS, result);
    void* library = dlopen("libcuda.so.1", RTLD_NOW);
    TRUE(library);
    printf(NEWEST ": dlsym %s, cuGetProcAddress %s\n", presence(dlsym(library, NEWEST)),
           presence(found));

    void* nvml = dlopen("libnvidia-ml.so.1", RTLD_NOW);
    TRUE(nvml);
    char text[96];
    CUuuid uuid;
    char uuid_text[64] = "GPU-";
    unsigned count = 0;
    void* device = NULL;
    unsigned long long memory[3];
    size_t total = 0;
    OK(((int (*)(void))dlsym(nvml, "nvmlInit_v2"))());
    /* Each nvmlInit has its own nvmlShutdown: another part of the process may use NVML meanwhile. */
    OK(((int (*)(void))dlsym(nvml, "nvmlInit_v2"))());
    OK(((int (*)(void))dlsym(nvml, "nvmlShutdown"))());
    OK(((int (*)(char*, unsigned))dlsym(nvml, "nvmlSystemGetDriverVersion"))(text, sizeof text));
    printf("nvml %s\n", text);
    OK(((int (*)(unsigned*))dlsym(nvml, "nvmlDeviceGetCount_v2"))(&count));
    TRUE(count == 1);
    OK(((int (*)(unsigned, void**))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(0, &device));
    EXPECT(2,
           ((int (*)(unsigned, void**))dlsym(nvml, "nvmlDeviceGetHandleByIndex_v2"))(1, &device));
    OK(((int (*)(void*, char*, unsigned))dlsym(nvml, "nvmlDeviceGetName"))(device, text,
                                                                           sizeof text));
    TRUE(!strcmp(text, "gpustasis emulated GPU"));
    OK(((int (*)(void*, char*, unsigned))dlsym(nvml, "nvmlDeviceGetUUID"))(device, text,
                                                                           sizeof text));
    OK(cuDeviceGetUuid(&uuid, 0));
    for (int i = 0; i < 16; ++i) {
        const size_t end = strlen(uuid_text);
        const int dash = i == 4 || i == 6 || i == 8 || i == 10;
        snprintf(uuid_text + end, sizeof uuid_text - end, "%s%02x", dash ? "-" : "",
                 (unsigned char)uuid.bytes[i]);
    }
    TRUE(!strcmp(text, uuid_text));
    OK(((int (*)(void*, unsigned long long*))dlsym(nvml, "nvmlDeviceGetMemoryInfo"))(device,
                                                                                     memory));
    OK(cuDeviceTotalMem(&total, 0));
    TRUE(memory[0] == total && memory[1] == total && memory[2] == 0);
    EXPECT(7, ((int (*)(char*, unsigned))dlsym(nvml, "nvmlSystemGetDriverVersion"))(text, 3));
    OK(((int (*)(void))dlsym(nvml, "nvmlShutdown"))());
    EXPECT(1, ((int (*)(void))dlsym(nvml, "nvmlShutdown"))());
    return 0;
}
