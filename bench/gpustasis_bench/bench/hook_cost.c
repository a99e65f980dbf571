// SPDX-License-Identifier: Apache-2.0
/* What the plugin's hooks cost for a process that has nothing to do with CUDA.
 *
 *     hook_cost PLUGIN CALLS THREADS
 *
 * Plays criu for the plugin (the symbols that it uses are below), and calls the two hooks of a dump
 * CALLS times for a child of THREADS threads, all of which sleep. Prints the median and the 99th percentile of each in
 * nanoseconds: "pause MEDIAN P99", "checkpoint MEDIAN P99". Link with -rdynamic. Each hook must answer
 * -ENOTSUP, "not mine"; exit status 1 if not.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { kStageDump = 0, kPauseDevices = 10, kCheckpointDevices = 11, kMaxHooks = 12 };

/* cr_plugin_desc_t of criu-plugin.h, CRIU 4.1 */
struct plugin {
    const char* name;
    int (*init)(int stage);
    void (*exit)(int stage, int result);
    unsigned version;
    unsigned max_hooks;
    int (*hooks[kMaxHooks])(int pid);
};

/* opts.final_state: 1, the tasks are left running */
int opts[64] = {1};

void print_on_level(unsigned level, const char* format, ...) {
    if (level > 1)
        return;
    va_list arguments;
    va_start(arguments, format);
    vfprintf(stderr, format, arguments);
    va_end(arguments);
}
int criu_get_image_dir(void) {
    static int fd = -1;
    if (fd < 0)
        fd = open("/tmp", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    return fd;
}
int add_inventory_plugin(const char* name) {
    (void)name;
    return 0;
}
bool check_and_remove_inventory_plugin(const char* name, size_t size) {
    (void)name, (void)size;
    return false;
}
void set_compel_interrupt_only_mode(void) {}

static uint64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

static int by_value(const void* left, const void* right) {
    const uint64_t a = *(const uint64_t*)left, b = *(const uint64_t*)right;
    return (a > b) - (a < b);
}

static bool measure(const char* name, int (*hook)(int), int pid, unsigned calls) {
    uint64_t* times = calloc(calls, sizeof *times);
    if (times == NULL)
        return false;
    for (unsigned i = 0; i < calls; ++i) {
        const uint64_t begin = now_ns();
        const int answer = hook(pid);
        times[i] = now_ns() - begin;
        if (answer != -ENOTSUP) {
            fprintf(stderr, "%s answers %d\n", name, answer);
            return false;
        }
    }
    qsort(times, calls, sizeof *times, by_value);
    printf("%s %llu %llu\n", name, (unsigned long long)times[calls / 2],
           (unsigned long long)times[calls - 1 - calls / 100]);
    free(times);
    return true;
}

static void* sleep_on(void* unused) {
    for (;;)
        pause();
    return unused;
}

/* Threads that do nothing; says so through the descriptor when all are there. */
static void be_many(unsigned threads, int ready) {
    pthread_attr_t attributes;
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, 64 << 10);
    for (unsigned i = 1; i < threads; ++i) {
        pthread_t thread;
        if (pthread_create(&thread, &attributes, sleep_on, NULL) != 0)
            _exit(1);
    }
    if (write(ready, "1", 1) != 1)
        _exit(1);
    sleep_on(NULL);
}

int main(int argc, char** argv) {
    int ready[2];
    if (argc != 4 || pipe2(ready, O_CLOEXEC) != 0)
        return 2;
    void* library = dlopen(argv[1], RTLD_NOW);
    struct plugin* plugin = library ? dlsym(library, "CR_PLUGIN_DESC") : NULL;
    if (plugin == NULL) {
        fprintf(stderr, "%s\n", dlerror());
        return 1;
    }
    const pid_t child = fork();
    if (child == 0)
        be_many((unsigned)strtoul(argv[3], NULL, 10), ready[1]);
    close(ready[1]);
    char there = 0;
    const unsigned calls = (unsigned)strtoul(argv[2], NULL, 10);
    bool ok =
        child > 0 && read(ready[0], &there, 1) == 1 && calls > 0 && plugin->init(kStageDump) == 0;
    ok = ok && measure("pause", plugin->hooks[kPauseDevices], child, calls);
    ok = ok && measure("checkpoint", plugin->hooks[kCheckpointDevices], child, calls);
    if (child > 0) {
        kill(child, SIGKILL);
        waitpid(child, NULL, 0);
    }
    plugin->exit(kStageDump, 0);
    return ok ? 0 : 1;
}
