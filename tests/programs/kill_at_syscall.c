/* Runs a program and kills it with SIGKILL at one of its system calls.
 *
 *     kill_at_syscall COUNT-FILE NUMBER ORPHANS PROGRAM ARGUMENT...
 *
 * NUMBER counts the system calls of the program's first thread from its start, 1 being the first; the
 * program is killed when it is about to make that one. 0: it is never killed. ORPHANS 1: processes
 * that it has left behind are killed with it. How many calls it has made is written to COUNT-FILE.
 * Exit status: the program's; 137 if it was killed; 125 for a fault of this program. Other threads
 * and children run untraced.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

static void fail(const char* what) {
    perror(what);
    exit(125);
}

/* This process is a subreaper: what the program leaves behind becomes its child. */
static void kill_orphans(pid_t program) {
    char path[64];
    snprintf(path, sizeof path, "/proc/self/task/%d/children", (int)getpid());
    FILE* file = fopen(path, "r");
    if (file == NULL)
        fail(path);
    int pid = 0;
    while (fscanf(file, "%d", &pid) == 1)
        if (pid != program)
            kill(pid, SIGKILL);
    fclose(file);
}

int main(int argc, char** argv) {
    if (argc < 5) {
        fprintf(stderr, "usage: kill_at_syscall COUNT-FILE NUMBER ORPHANS PROGRAM ARGUMENT...\n");
        return 125;
    }
    const unsigned long last = strtoul(argv[2], NULL, 10);
    const bool orphans = strcmp(argv[3], "1") == 0;
    if (orphans && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
        fail("PR_SET_CHILD_SUBREAPER");
    const pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        execv(argv[4], argv + 4);
        fail(argv[4]);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        fail("waitpid");
    const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL | PTRACE_O_TRACEEXEC;
    if (ptrace(PTRACE_SETOPTIONS, child, NULL, (void*)options) != 0)
        fail("PTRACE_SETOPTIONS");
    unsigned long count = 0;
    bool entering = true;
    for (long deliver = 0;;) {
        if (ptrace(PTRACE_SYSCALL, child, NULL, (void*)deliver) != 0 && errno != ESRCH)
            fail("PTRACE_SYSCALL");
        if (waitpid(child, &status, 0) != child)
            fail("waitpid");
        if (WIFEXITED(status) || WIFSIGNALED(status))
            break;
        deliver = 0;
        if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            if (entering && ++count == last) {
                if (orphans)
                    kill_orphans(child);
                kill(child, SIGKILL);
            }
            entering = !entering;
        } else if (status >> 16 == 0) {
            deliver = WSTOPSIG(status);
        }
    }
    FILE* file = fopen(argv[1], "w");
    if (file == NULL || fprintf(file, "%lu\n", count) < 0 || fclose(file) != 0)
        fail(argv[1]);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}
