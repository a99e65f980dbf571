// SPDX-License-Identifier: Apache-2.0
// Another plugin for criu. It answers for every process at HOOKS, unless told otherwise RESUME_DEVICES_LATE, and
// does nothing: criu asks no plugin behind it then. With HOLDS it opens a file in the image directory when a task is to be
// checkpointed, and keeps it open for writing.
#include <errno.h>
#include <fcntl.h>

struct plugin {
    const char* name;
    int (*init)(int stage);
    void (*exit)(int stage, int ret);
    unsigned version;
    unsigned max_hooks;
    void* hooks[12];
};

extern int criu_get_image_dir(void);

static int init(int stage) {
    (void)stage;
    return 0;
}

static void end(int stage, int ret) {
    (void)stage;
    (void)ret;
}

#ifdef HOLDS
#define HOOKS [11] = (void*)answer // CHECKPOINT_DEVICES

static int answer(int pid) {
    (void)pid;
    if (openat(criu_get_image_dir(), "held.img", O_WRONLY | O_CREAT | O_CLOEXEC, 0600) < 0)
        return -1;
    return -ENOTSUP;
}
#else
#ifndef HOOKS
#define HOOKS [9] = (void*)answer // RESUME_DEVICES_LATE
#endif

static int answer(int pid) {
    (void)pid;
    return 0;
}
#endif

struct plugin CR_PLUGIN_DESC = {
    .name = "other",
    .init = init,
    .exit = end,
    .version = 2U << 8,
    .max_hooks = 12,
    .hooks = {HOOKS},
};
