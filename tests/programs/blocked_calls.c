// SPDX-License-Identifier: Apache-2.0
/* Threads that wait in system calls; every one of them must end as if nothing had come between.
 *
 * blocked_calls MODE, where MODE says in which call the main thread waits; "ready" is printed
 * before. Then one line: "good" and how long the call took in ms, or what was wrong.
 *   sleep MS | read | poll MS | epoll MS | futex MS | sigtimedwait MS | compute MS
 *   exited MS        the main thread has ended; another one sleeps
 *   seccomp MS       sleeps under filters that kill at userfaultfd
 *   signals MS       sleeps in short naps and counts SIGUSR1, until SIGUSR2 comes; ends with how many
 *                    there were
 */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/futex.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t signals;
static volatile sig_atomic_t is_over;
static long wait_ms;

static double now_ms(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec / 1e6;
}

static struct timespec of_ms(long ms) {
    return (struct timespec){.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000};
}

static void count_signal(int number) {
    (void)number;
    ++signals;
}

static void note_end(int number) {
    (void)number;
    is_over = 1;
}

/* An errno, or 0 if the call ended as it should. */
static int wait_in(const char* mode) {
    struct timespec time = of_ms(wait_ms);
    if (strcmp(mode, "sleep") == 0 || strcmp(mode, "seccomp") == 0)
        return nanosleep(&time, NULL) == 0 ? 0 : errno;
    if (strcmp(mode, "read") == 0) {
        char byte = 0;
        ssize_t got = read(0, &byte, 1);
        return got == 1 && byte == 'x' ? 0 : got < 0 ? errno : EIO;
    }
    if (strcmp(mode, "poll") == 0)
        return poll(NULL, 0, (int)wait_ms) == 0 ? 0 : errno;
    if (strcmp(mode, "epoll") == 0) {
        struct epoll_event event;
        int fd = epoll_create1(0);
        return epoll_wait(fd, &event, 1, (int)wait_ms) == 0 ? 0 : errno;
    }
    if (strcmp(mode, "futex") == 0) {
        uint32_t word = 0;
        long result = syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 0, &time, NULL, 0);
        return result == -1 && errno == ETIMEDOUT ? 0 : result == 0 ? EIO : errno;
    }
    if (strcmp(mode, "sigtimedwait") == 0) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR2);
        return sigtimedwait(&set, NULL, &time) == -1 && errno == EAGAIN ? 0 : errno;
    }
    if (strcmp(mode, "compute") == 0) {
        volatile double x = 1;
        for (double end = now_ms() + (double)wait_ms; now_ms() < end;) {
            double y = 1;
            for (int i = 0; i < 100000; ++i)
                y = y * 1.0000001 + 0.5;
            if (x != 1 && x != y)
                return EIO;
            x = y;
        }
        return 0;
    }
    if (strcmp(mode, "signals") == 0) {
        for (double end = now_ms() + (double)wait_ms; !is_over && now_ms() < end;)
            poll(NULL, 0, 1);
        return 0;
    }
    return EINVAL;
}

static void forbid_userfaultfd(void) {
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_userfaultfd, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof(filter) / sizeof(*filter), filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0 ||
        prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        exit(3);
}

static void report(const char* mode) {
    double begin = now_ms();
    puts("ready");
    int error = wait_in(mode);
    if (error != 0)
        printf("%s\n", strerror(error));
    else if (strcmp(mode, "signals") == 0)
        printf("good %d\n", (int)signals);
    else
        printf("good %.0f\n", now_ms() - begin);
    exit(0);
}

static void* other_thread(void* mode) {
    (void)mode;
    report("sleep");
    return NULL;
}

int main(int argc, char** argv) {
    if (argc < 2)
        return 2;
    wait_ms = argc > 2 ? atol(argv[2]) : 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    signal(SIGUSR1, count_signal);
    signal(SIGUSR2, note_end);
    if (strcmp(argv[1], "sigtimedwait") == 0) {
        sigset_t set;
        sigemptyset(&set);
        sigaddset(&set, SIGUSR2);
        sigprocmask(SIG_BLOCK, &set, NULL);
    }
    if (strcmp(argv[1], "seccomp") == 0)
        forbid_userfaultfd();
    if (strcmp(argv[1], "exited") == 0) {
        pthread_t thread;
        prctl(PR_SET_PDEATHSIG, 0);
        pthread_create(&thread, NULL, other_thread, NULL);
        pthread_exit(NULL);
    }
    report(argv[1]);
}
