// SPDX-License-Identifier: Apache-2.0
// A plugin for criu that says of every process that it has resumed its devices, and does nothing. criu asks
// no plugin behind it then.
struct plugin {
    const char* name;
    int (*init)(int stage);
    void (*exit)(int stage, int ret);
    unsigned version;
    unsigned max_hooks;
    void* hooks[12];
};

static int init(int stage) {
    (void)stage;
    return 0;
}

static void end(int stage, int ret) {
    (void)stage;
    (void)ret;
}

static int resume_devices_late(int pid) {
    (void)pid;
    return 0;
}

struct plugin CR_PLUGIN_DESC = {
    .name = "answering",
    .init = init,
    .exit = end,
    .version = 2U << 8,
    .max_hooks = 12,
    .hooks = {[9] = (void*)resume_devices_late},
};
