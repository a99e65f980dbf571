// SPDX-License-Identifier: Apache-2.0
/* For LD_PRELOAD: a DirtyTracker that ends, or stops, while it has a thread of another process make a
 * userfaultfd.
 *
 * BREAK_OFF is two words. Where: begun, nothing is made yet; made, the descriptor is there and not
 * closed. And how: kill; stop, with SIGSTOP.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/user.h>

long ptrace(enum __ptrace_request request, ...) {
    static bool making, done;
    va_list arguments;
    va_start(arguments, request);
    const pid_t pid = va_arg(arguments, pid_t);
    void* address = va_arg(arguments, void*);
    void* data = va_arg(arguments, void*);
    va_end(arguments);
    if (request == PTRACE_SETREGS) {
        const struct user_regs_struct* registers = data;
        const char* words = getenv("BREAK_OFF");
        const bool is_begun = registers->orig_rax == SYS_userfaultfd;
        const bool is_made = making && registers->rax == SYS_close;
        making |= is_begun;
        if (words != NULL && !done && (strncmp(words, "begun", 5) == 0 ? is_begun : is_made)) {
            done = true;
            raise(strstr(words, "kill") != NULL ? SIGKILL : SIGSTOP); // for this thread: at once
        }
    }
    long (*next)(enum __ptrace_request, pid_t, void*, void*);
    *(void**)&next = dlsym(RTLD_NEXT, "ptrace");
    return next(request, pid, address, data);
}
