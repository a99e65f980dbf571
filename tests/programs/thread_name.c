// SPDX-License-Identifier: Apache-2.0
/* thread_name NAME [LIBRARY]: has a thread called NAME, maps LIBRARY, and says "step N ok" now and then.
 * In NAME, "FILE" stands for the 11 digits with which the driver would name its thread if it were
 * to write its requests to this program's descriptor 9 and to read from 8: standard input is
 * duplicated there. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>
#include <unistd.h>

enum { kRead = 8, kWrite = 9, kStepMs = 10 };

static char name[32];
static sem_t named;

static void* wait_forever(void* unused) {
    prctl(PR_SET_NAME, name, 0, 0, 0);
    sem_post(&named);
    for (;;)
        poll(NULL, 0, -1);
    return unused;
}

int main(int argc, char** argv) {
    pthread_t thread;
    if (argc < 2 || (argc > 2 && dlopen(argv[2], RTLD_NOW) == NULL))
        return 2;
    const char* file = strstr(argv[1], "FILE");
    if (file == NULL)
        snprintf(name, sizeof name, "%s", argv[1]);
    else
        snprintf(name, sizeof name, "%.*s%011llx", (int)(file - argv[1]), argv[1],
                 (unsigned long long)kWrite << 22 | kRead);
    sem_init(&named, 0, 0);
    if (dup2(STDIN_FILENO, kRead) < 0 || dup2(STDIN_FILENO, kWrite) < 0 ||
        pthread_create(&thread, NULL, wait_forever, NULL) != 0)
        return 3;
    while (sem_wait(&named) != 0) {
    }
    for (unsigned long step = 0;; ++step) {
        printf("%d step %lu ok\n", (int)getpid(), step);
        fflush(stdout);
        poll(NULL, 0, kStepMs);
    }
}
