// SPDX-License-Identifier: Apache-2.0
// A plugin for a criu that has more functions than the one that loads it.
#include <stddef.h>
int added_in_criu_9(void); /* as criu-plugin.h of criu 4.1 describes a plugin otherwise */
static int init(int stage) {
    (void)stage;
    return added_in_criu_9();
}
struct {
    const char* name;
    int (*init)(int);
    void (*exit)(int, int);
    unsigned version, max_hooks;
    void* hooks[12];
} CR_PLUGIN_DESC = {"newer_plugin", init, NULL, 0x200, 12, {NULL}};
