// SPDX-License-Identifier: Apache-2.0
/* A process that writes the pages it is told to, and nothing else of those mappings.
 *
 * Commands are lines on stdin; each is answered with one line on stdout. Numbers are hexadecimal.
 *   map KIND PAGES       KIND: p private, s shared, h huge pages (aligned to 2 MiB), f private, of
 *                        a file full of ones; answers the address
 *   write ADDRESS...     add one to the byte at each; answers "ok", as the rest
 *   read ADDRESS...
 *   unmap|drop|readonly|writable ADDRESS LENGTH
 *   move ADDRESS LENGTH  mremap to somewhere else; answers the new address
 *   sum ADDRESS LENGTH   answers the sum of all bytes
 *   fork ADDRESS...      a child that writes to each, and stays; answers its pid once it has written
 *   storm ADDRESS LENGTH COUNT  write to COUNT pages of it, picked at random
 *   fds                  answers how many descriptors are open, and the highest
 *   userfaultfd          make one, and do not use it
 *   thread               start a thread that does nothing
 *   exec PROGRAM         run another program instead; no answer
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { PAGE = 4096, HUGE = 2 << 20, MAX_LINE = 1 << 20 };

static char line[MAX_LINE];

static void* map_pages(char kind, size_t length) {
    if (kind == 'f') {
        static char ones[PAGE];
        FILE* file = tmpfile();
        memset(ones, 1, sizeof(ones));
        for (size_t at = 0; at < length; at += PAGE)
            if (fwrite(ones, 1, PAGE, file) != PAGE)
                exit(3);
        fflush(file);
        void* at = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE, fileno(file), 0);
        fclose(file);
        return at;
    }
    if (kind != 'h') {
        int flags = MAP_ANONYMOUS | (kind == 's' ? MAP_SHARED : MAP_PRIVATE);
        void* at = mmap(NULL, length, PROT_READ | PROT_WRITE, flags, -1, 0);
        madvise(at, length, MADV_NOHUGEPAGE);
        return at;
    }
    char* room = mmap(NULL, length + HUGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    char* at = (char*)(((uintptr_t)room + HUGE - 1) & ~(uintptr_t)(HUGE - 1));
    at = mmap(at, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    madvise(at, length, MADV_HUGEPAGE);
    return at;
}

static void touch(char* words, int write) {
    for (char* word = strtok(words, " \n"); word != NULL; word = strtok(NULL, " \n")) {
        volatile char* byte = (volatile char*)strtoull(word, NULL, 16);
        if (write)
            *byte = (char)(*byte + 1);
        else
            (void)*byte;
    }
}

static void count_descriptors(void) {
    int count = 0, highest = 0;
    DIR* dir = opendir("/proc/self/fd");
    for (struct dirent* entry; (entry = readdir(dir)) != NULL;) {
        if (entry->d_name[0] == '.' || atoi(entry->d_name) == dirfd(dir))
            continue;
        ++count;
        highest = atoi(entry->d_name) > highest ? atoi(entry->d_name) : highest;
    }
    closedir(dir);
    printf("%x %x\n", (unsigned)count, (unsigned)highest);
}

static void* idle(void* nothing) {
    for (;;)
        pause();
    return nothing;
}

int main(void) {
    char kind = 0;
    unsigned long long address = 0, length = 0;
    setvbuf(stdout, NULL, _IOLBF, 0);
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    unsigned long long random = 88172645463325252ULL;
    while (fgets(line, sizeof(line), stdin) != NULL) {
        char* arguments = strchr(line, ' ');
        arguments = arguments == NULL ? line + strlen(line) : arguments + 1;
        sscanf(arguments, "%llx %llx", &address, &length);
        void* at = (void*)address;
        if (sscanf(line, "map %c %llx", &kind, &length) == 2) {
            printf("%llx\n", (unsigned long long)(uintptr_t)map_pages(kind, length * PAGE));
            continue;
        }
        if (strncmp(line, "fork", 4) == 0) {
            int written[2];
            char byte = 0;
            fflush(stdout);
            if (pipe(written) != 0)
                return 5;
            pid_t child = fork();
            if (child == 0) {
                prctl(PR_SET_PDEATHSIG, SIGKILL);
                touch(arguments, 1);
                if (write(written[1], &byte, 1) != 1)
                    _exit(5);
                for (;;)
                    pause();
            }
            close(written[1]);
            if (read(written[0], &byte, 1) != 1)
                return 5;
            close(written[0]);
            printf("%x\n", (unsigned)child);
            continue;
        }
        if (strncmp(line, "sum", 3) == 0) {
            unsigned long long sum = 0;
            for (unsigned long long i = 0; i < length; ++i)
                sum += ((unsigned char*)at)[i];
            printf("%llx\n", sum);
            continue;
        }
        if (strncmp(line, "storm", 5) == 0) {
            unsigned long long count = 0;
            sscanf(arguments, "%*x %*x %llx", &count);
            for (; count != 0; --count) {
                random ^= random << 13, random ^= random >> 7, random ^= random << 17;
                ++((unsigned char*)at)[random % length];
            }
            puts("ok");
            continue;
        }
        if (strncmp(line, "fds", 3) == 0) {
            count_descriptors();
            continue;
        }
        if (strncmp(line, "exec", 4) == 0) {
            arguments[strcspn(arguments, "\n")] = 0;
            execl("/bin/sh", "sh", "-c", arguments, (char*)NULL);
            return 4;
        }
        if (strncmp(line, "move", 4) == 0) {
            void* to = mmap(NULL, length, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            to = mremap(at, length, length, MREMAP_MAYMOVE | MREMAP_FIXED, to);
            printf("%llx\n", (unsigned long long)(uintptr_t)to);
            continue;
        }
        int failed = 0;
        if (strncmp(line, "userfaultfd", 11) == 0) {
            enum { USER_MODE_ONLY = 1 };
            failed = syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK | USER_MODE_ONLY) < 0;
        } else if (strncmp(line, "thread", 6) == 0) {
            pthread_t thread;
            failed = pthread_create(&thread, NULL, idle, NULL);
        } else if (strncmp(line, "write", 5) == 0)
            touch(arguments, 1);
        else if (strncmp(line, "read ", 5) == 0)
            touch(arguments, 0);
        else if (strncmp(line, "unmap", 5) == 0)
            failed = munmap(at, length);
        else if (strncmp(line, "drop", 4) == 0)
            failed = madvise(at, length, MADV_DONTNEED);
        else if (strncmp(line, "readonly", 8) == 0)
            failed = mprotect(at, length, PROT_READ);
        else if (strncmp(line, "writable", 8) == 0)
            failed = mprotect(at, length, PROT_READ | PROT_WRITE);
        else
            return 2;
        puts(failed ? "failed" : "ok");
    }
    return 0;
}
