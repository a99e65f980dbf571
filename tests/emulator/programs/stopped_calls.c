// SPDX-License-Identifier: Apache-2.0
/* Checkpoints and restores a process as CRIU does: with all its threads stopped by ptrace but the
 * restore thread.
 *
 *     stopped_calls PID CYCLES
 *
 * Each cycle: Lock with all running; stop all; let the restore thread alone run; Checkpoint; compare
 * the list of threads with that before; Restore; stop the restore thread; let all go; Unlock. Prints
 * "done", or what was not as it should be.
 */
#define _GNU_SOURCE
#include "check.h"

#include <dirent.h>
#include <errno.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

enum { kMaxThreads = 256 };

static int list_threads(int pid, int* tids) {
    char path[64];
    int count = 0;
    snprintf(path, sizeof path, "/proc/%d/task", pid);
    DIR* tasks = opendir(path);
    TRUE(tasks);
    for (struct dirent* entry; (entry = readdir(tasks));) {
        if (entry->d_name[0] != '.') {
            TRUE(count < kMaxThreads);
            tids[count++] = atoi(entry->d_name);
        }
    }
    closedir(tasks);
    return count;
}

static void stop(int tid) {
    int status = 0;
    TRUE(ptrace(PTRACE_INTERRUPT, tid, 0, 0) == 0);
    TRUE(waitpid(tid, &status, __WALL) == tid && WIFSTOPPED(status));
}

int main(int argc, char** argv) {
    TRUE(argc == 3);
    const int pid = atoi(argv[1]);
    int restore_thread = 0;
    OK(cuInit(0));
    OK(cuCheckpointProcessGetRestoreThreadId(pid, &restore_thread));
    for (int cycle = 0; cycle < atoi(argv[2]); ++cycle) {
        int before[kMaxThreads], after[kMaxThreads];
        CUprocessState state = CU_PROCESS_STATE_FAILED;
        OK(cuCheckpointProcessLock(pid, NULL));
        const int count = list_threads(pid, before);
        for (int i = 0; i < count; ++i) {
            TRUE(ptrace(PTRACE_SEIZE, before[i], 0, 0) == 0);
            stop(before[i]);
        }
        TRUE(ptrace(PTRACE_CONT, restore_thread, 0, 0) == 0);
        OK(cuCheckpointProcessCheckpoint(pid, NULL));
        TRUE(list_threads(pid, after) == count);
        TRUE(!memcmp(before, after, (size_t)count * sizeof before[0]));
        OK(cuCheckpointProcessGetState(pid, &state));
        EXPECT(CU_PROCESS_STATE_CHECKPOINTED, state);
        OK(cuCheckpointProcessRestore(pid, NULL));
        TRUE(list_threads(pid, after) == count);
        OK(cuCheckpointProcessGetState(pid, &state));
        EXPECT(CU_PROCESS_STATE_LOCKED, state);
        stop(restore_thread);
        for (int i = 0; i < count; ++i)
            TRUE(ptrace(PTRACE_DETACH, before[i], 0, 0) == 0);
        OK(cuCheckpointProcessUnlock(pid, NULL));
        usleep(20000);
    }
    printf("done\n");
    return 0;
}
