// SPDX-License-Identifier: Apache-2.0
/* Runs a program and kills it with SIGKILL at one of its system calls.
 *
 *     kill_at_syscall COUNT-FILE NUMBER HOW MARK PROGRAM ARGUMENT...
 *
 * NUMBER counts the system calls of the program's first thread, 1 being the first; the program is killed
 * when it is about to make that one. 0: it is never killed. If MARK is not empty, counting begins behind
 * the first write of that thread that holds it, or its first rename to that name. HOW is a word of
 * letters: o, processes that the program has left behind are killed with it; p, before the kill this
 * program stops itself, so that whoever started it can look, and goes on after a SIGCONT; -, neither.
 * How many calls were made is written to COUNT-FILE. Exit status: the program's; 137 if it was
 * killed; 125 for a fault of this program. Other threads and children run untraced.
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
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <sys/user.h>
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

/* Whether these bytes of `pid`, as far as they are mapped, hold `mark`. */
static bool holds(pid_t pid, unsigned long address, size_t size, const char* mark) {
    char text[4096];
    const size_t whole = size < sizeof text ? size : sizeof text;
    const size_t here = sizeof text - address % sizeof text; /* in the first page */
    const size_t first = whole < here ? whole : here;
    struct iovec to = {text, whole};
    struct iovec from[] = {{(void*)address, first}, {(char*)address + first, whole - first}};
    const ssize_t got = process_vm_readv(pid, &to, 1, from, 2, 0);
    return got > 0 && memmem(text, (size_t)got, mark, strlen(mark)) != NULL;
}

/* Whether the call that `pid` is about to make is a write that holds `mark`, or a rename to it. */
static bool makes(pid_t pid, const char* mark) {
    struct user_regs_struct registers;
    if (ptrace(PTRACE_GETREGS, pid, NULL, &registers) != 0)
        return false;
    switch (registers.orig_rax) {
    case SYS_write: return holds(pid, registers.rsi, registers.rdx, mark);
    case SYS_rename: return holds(pid, registers.rsi, strlen(mark), mark);
    case SYS_renameat:
    case SYS_renameat2: return holds(pid, registers.r10, strlen(mark), mark);
    default: return false;
    }
}

int main(int argc, char** argv) {
    if (argc < 6) {
        fprintf(stderr, "usage: kill_at_syscall COUNT-FILE NUMBER HOW MARK PROGRAM ARGUMENT...\n");
        return 125;
    }
    const unsigned long last = strtoul(argv[2], NULL, 10);
    const bool orphans = strchr(argv[3], 'o') != NULL, pause_first = strchr(argv[3], 'p') != NULL;
    if (orphans && prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0)
        fail("PR_SET_CHILD_SUBREAPER");
    const pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        ptrace(PTRACE_TRACEME, 0, NULL, NULL);
        raise(SIGSTOP);
        execv(argv[5], argv + 5);
        fail(argv[5]);
    }
    int status = 0;
    if (waitpid(child, &status, 0) != child || !WIFSTOPPED(status))
        fail("waitpid");
    const long options = PTRACE_O_TRACESYSGOOD | PTRACE_O_EXITKILL | PTRACE_O_TRACEEXEC;
    if (ptrace(PTRACE_SETOPTIONS, child, NULL, (void*)options) != 0)
        fail("PTRACE_SETOPTIONS");
    unsigned long count = 0;
    bool entering = true, counting = argv[4][0] == '\0';
    for (long deliver = 0;;) {
        if (ptrace(PTRACE_SYSCALL, child, NULL, (void*)deliver) != 0 && errno != ESRCH)
            fail("PTRACE_SYSCALL");
        if (waitpid(child, &status, 0) != child)
            fail("waitpid");
        if (WIFEXITED(status) || WIFSIGNALED(status))
            break;
        deliver = 0;
        if (WSTOPSIG(status) == (SIGTRAP | 0x80)) {
            if (entering && !counting) {
                counting = makes(child, argv[4]);
            } else if (entering && ++count == last) {
                if (pause_first)
                    raise(SIGSTOP);
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
