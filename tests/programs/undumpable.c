// SPDX-License-Identifier: Apache-2.0
// Does one thing that hinders a checkpoint, by the name of its argument, and waits.
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <linux/perf_event.h>
#include <stdio.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

static const int kUserModeOnly = 1; // UFFD_USER_MODE_ONLY: needs no privilege

/// An io_uring; where the kernel forbids that, a perf event, which CRIU cannot dump either.
static int ring(void) {
    struct io_uring_params p = {0};
    struct perf_event_attr a = {.type = PERF_TYPE_SOFTWARE,
                                .size = sizeof a,
                                .config = PERF_COUNT_SW_DUMMY,
                                .exclude_kernel = 1,
                                .exclude_hv = 1};
    return syscall(SYS_io_uring_setup, 4, &p) >= 0 ||
           syscall(SYS_perf_event_open, &a, 0, -1, -1, 0L) >= 0;
}

/// Both ends of a connection.
static int connection(void) {
    struct sockaddr_in here = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    socklen_t size = sizeof here;
    const int server = socket(AF_INET, SOCK_STREAM, 0), client = socket(AF_INET, SOCK_STREAM, 0);
    return bind(server, (struct sockaddr*)&here, size) == 0 &&
           getsockname(server, (struct sockaddr*)&here, &size) == 0 && listen(server, 1) == 0 &&
           connect(client, (struct sockaddr*)&here, size) == 0 && accept(server, NULL, NULL) >= 0;
}

static int traced_child(void) {
    const pid_t child = fork();
    while (child == 0)
        pause();
    return child > 0 && ptrace(PTRACE_SEIZE, child, NULL, NULL) == 0;
}

int main(int argc, char** argv) {
    const char* what = argc > 1 ? argv[1] : "";
    int done = 0;
    if (strcmp(what, "ring") == 0)
        done = ring();
    else if (strcmp(what, "userfaultfd") == 0)
        done = syscall(SYS_userfaultfd, O_CLOEXEC | kUserModeOnly) >= 0;
    else if (strcmp(what, "connection") == 0)
        done = connection();
    else if (strcmp(what, "traced") == 0)
        done = traced_child();
    else if (strcmp(what, "gpu-file") == 0)
        done = open("/dev/nvidia0", O_RDWR) >= 0;
    if (!done) {
        perror(what);
        return 1;
    }
    for (;;)
        pause();
}
