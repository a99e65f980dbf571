// SPDX-License-Identifier: Apache-2.0
/* Runs a program that may not make a userfaultfd, as a container's cannot.
 *
 *     without_userfaultfd PROGRAM ARGUMENT...
 *
 * The program has no capabilities, and a seccomp filter answers userfaultfd(2) with EPERM. It keeps its
 * user id: without CAP_SYS_RESOURCE, which a test machine may lack, CRIU cannot dump another user's.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

static void fail(const char* what) {
    perror(what);
    exit(125);
}

int main(int argc, char** argv) {
    if (argc < 2) {
        fprintf(stderr, "usage: without_userfaultfd PROGRAM ARGUMENT...\n");
        return 125;
    }
    /* What is not in this set is lost when the program is executed. */
    for (unsigned long capability = 0; prctl(PR_CAPBSET_READ, capability, 0, 0, 0) >= 0;
         ++capability)
        if (prctl(PR_CAPBSET_DROP, capability, 0, 0, 0) != 0)
            fail("PR_CAPBSET_DROP");
    struct sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog filter = {sizeof code / sizeof code[0], code};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) != 0)
        fail("PR_SET_SECCOMP");
    execv(argv[1], argv + 1);
    fail(argv[1]);
}
