// SPDX-License-Identifier: Apache-2.0
/* A job with much of what a checkpoint has to bring back, that checks all of it in rounds and says so.
 *
 *     whole_tree --disk DIR --tmpfs DIR [--seed N] [--cuda 0] [--wrong KIND] [--wrong-in PROCESS]
 *
 * Fifty processes: the first, seven children of it, and six children of each of these, which are a
 * group with their parent. Two of the last use CUDA. Every word of every memory is a number that
 * follows from the seed, from which memory it is and from its place. In each round every process
 * writes the numbers of that round into its slots, of what it shares and of what is its own; when all
 * have done so, each compares every word with what it must be, and the first says
 * "round N ok: P processes, T threads". What is wrong is said as
 * "WRONG KIND process P place N round R: FOUND, not WANTED", and ends the job.
 *
 * --wrong: in the third round that process (46, unless told) is given what a bad restore would: one bit
 * of that memory is another, a pipe has lost a word, a descriptor has another offset, a thread is gone,
 * memory is no longer shared, or is.
 */
#include "whole_tree_memory.h"

#include <dirent.h>
#include <limits.h>
#include <linux/futex.h>
#include <malloc.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>

enum { kMaxThreads = 3, kStackWords = 2048, kBehind = 3, kRoundPause = 20000, kWait_s = 60 };

/* In a page that all map. */
struct common {
    _Atomic uint32_t arrived, phase;
    _Atomic uint32_t threads[kProcesses];
};

struct thread {
    unsigned number;
    uint64_t seed;
    _Atomic uint32_t done;
};

static struct common* common;
static struct thread threads[kMaxThreads];
static unsigned thread_count, threads_wanted;
static _Atomic uint32_t threads_go;
static int from_parent = -1, to_child[kGroups], child_numbers[kGroups], children;

static void wait_for(_Atomic uint32_t* at, uint32_t before, int flags) {
    const struct timespec tenth = {.tv_nsec = 100000000};
    for (int waited = 0; *at == before; ++waited) {
        if (waited > 10 * kWait_s)
            fail("nobody-is-heard-of", 0, *at, before);
        syscall(SYS_futex, at, FUTEX_WAIT | flags, before, &tenth, NULL, 0);
    }
}
static void set_and_wake(_Atomic uint32_t* at, uint32_t value, int flags) {
    *at = value;
    syscall(SYS_futex, at, FUTEX_WAKE | flags, INT_MAX, NULL, NULL, 0);
}

static void await_all(void) {
    const uint32_t phase = common->phase;
    if (atomic_fetch_add(&common->arrived, 1) + 1 == kProcesses) {
        common->arrived = 0;
        set_and_wake(&common->phase, phase + 1, 0);
    } else
        wait_for(&common->phase, phase, 0);
}

/* Knows its stack and its own variables, writes at an even call of the first thread, checks at an odd. */
static void* run_thread(void* argument) {
    static __thread uint64_t own[kStackWords];
    struct thread* thread = argument;
    volatile uint64_t stack[kStackWords];
    const long tid = syscall(SYS_gettid);
    char name[16], found_name[16];
    snprintf(name, sizeof name, "tree-%d-%u", self, thread->number);
    REQUIRE(prctl(PR_SET_NAME, name) == 0);
    for (size_t i = 0; i < kStackWords; ++i)
        stack[i] = word(thread->seed, i), own[i] = word(thread->seed + 1, i);
    for (uint32_t done = 0;;) {
        wait_for(&threads_go, done, FUTEX_PRIVATE_FLAG);
        const uint32_t round = (done = threads_go) / 2;
        for (size_t i = 0; i < kStackWords; ++i) {
            const uint64_t number = thread->seed + (i < kSlot ? round * 2 : 0);
            if (done % 2 == 0)
                stack[i] = i < kSlot ? word(number, i) : stack[i],
                own[i] = i < kSlot ? word(number + 1, i) : own[i];
            else if (stack[i] != word(number, i))
                fail("thread-stack", i, stack[i], word(number, i));
            else if (own[i] != word(number + 1, i))
                fail("thread-variables", i, own[i], word(number + 1, i));
        }
        REQUIRE(prctl(PR_GET_NAME, found_name) == 0 && strcmp(name, found_name) == 0);
        REQUIRE(syscall(SYS_gettid) == tid);
        if (done % 2 == 0 && is_wrong("thread-stack"))
            stack[kStackWords / 2] ^= 4;
        if (done % 2 == 0 && is_wrong("thread-variables"))
            own[kStackWords / 2] ^= 4;
        set_and_wake(&thread->done, done, FUTEX_PRIVATE_FLAG);
        if (done % 2 == 0 && is_wrong("thread-gone"))
            return NULL;
    }
}

static unsigned count_threads(void) {
    unsigned found = 0;
    DIR* tasks = opendir("/proc/self/task");
    REQUIRE(tasks != NULL);
    while (readdir(tasks) != NULL)
        ++found;
    closedir(tasks);
    return found - 2;
}

static void let_threads(uint32_t call) {
    set_and_wake(&threads_go, call, FUTEX_PRIVATE_FLAG);
    for (unsigned i = 0; i < thread_count; ++i)
        for (uint32_t done; (done = threads[i].done) != call;)
            wait_for(&threads[i].done, done, FUTEX_PRIVATE_FLAG);
}

/* What a parent writes to a child in a round; the child reads it kBehind rounds later. */
static size_t piece(int child) {
    return 40 + (size_t)child * 20;
}
static uint64_t in_pipe(int child, uint32_t round, size_t i) {
    return word(seed * 31 + (uint64_t)child * 7919 + round * 104729u, i);
}

static void write_pipes(void) {
    uint64_t words[1100];
    for (int i = 0; i < children; ++i) {
        const size_t count = piece(child_numbers[i]);
        for (size_t k = 0; k < count; ++k)
            words[k] = in_pipe(child_numbers[i], this_round, k);
        REQUIRE(write(to_child[i], words, count * 8) == (ssize_t)(count * 8));
    }
}

static void read_pipe(void) {
    uint64_t words[1100];
    const uint32_t rounds = this_round < kBehind ? this_round : kBehind;
    const size_t count = piece(self);
    int there = 0;
    REQUIRE(ioctl(from_parent, FIONREAD, &there) == 0);
    if ((size_t)there != count * 8 * rounds)
        fail("pipe", 0, (uint64_t)there, count * 8 * rounds);
    if (this_round < kBehind)
        return;
    REQUIRE(read(from_parent, words, count * 8) == (ssize_t)(count * 8));
    for (size_t k = 0; k < count; ++k)
        if (words[k] != in_pipe(self, this_round - kBehind + 1, k))
            fail("pipe", k, words[k], in_pipe(self, this_round - kBehind + 1, k));
}

static void add(struct area area) {
    REQUIRE(area_count < kMaxAreas);
    areas[area_count++] = area;
}

static uint64_t* map(size_t bytes, int flags, int fd) {
    uint64_t* at =
        mmap(NULL, bytes, PROT_READ | PROT_WRITE, flags | (fd < 0 ? MAP_ANONYMOUS : 0), fd, 0);
    REQUIRE(at != MAP_FAILED);
    return at;
}

static uint64_t* heap(size_t bytes) {
    uint64_t* at = aligned_alloc(kPage, bytes); /* of brk, which main has seen to */
    REQUIRE(at != NULL);
    return at;
}

/* A file of `bytes` in DIR, or a memfd; named: it keeps its name. */
static int make_file(const char* directory, const char* name, size_t bytes, bool named,
                     char* path) {
    int fd = -1;
    if (directory == NULL) {
        fd = memfd_create(name, MFD_CLOEXEC);
    } else {
        snprintf(path, PATH_MAX, "%s/%s-%d-of-%d", directory, name, self, (int)getpid());
        fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    }
    REQUIRE(fd >= 0 && ftruncate(fd, (off_t)bytes) == 0);
    REQUIRE(named || directory == NULL || unlink(path) == 0);
    return fd;
}

/* Made before a fork, so that the children have it too. flags: of its mapping, 0: none. */
static void inherit(const char* kind, size_t bytes, enum owner owner, int flags, int fd,
                    const char* path) {
    struct area area = {
        .kind = kind, .bytes = bytes, .owner = owner, .fd = -1, .kept = fd, .path = path};
    area.seed = word(seed + (uint64_t)area_count * 997, (uint64_t)self);
    if (strcmp(kind, "cow-heap") == 0 && strcmp(wrong, "cow-is-shared") != 0)
        area.at = heap(bytes);
    else if (flags != 0)
        area.at =
            map(bytes, owner == kCopied && strcmp(wrong, "cow-is-shared") == 0 ? MAP_SHARED : flags,
                fd);
    write_all(&area);
    if (path != NULL)
        close(fd), area.kept = -1;
    add(area);
}

static void make_for_all(void) {
    common = (struct common*)map(kPage, MAP_SHARED, -1);
    inherit("cow-heap", 2 * MIB, kCopied, MAP_PRIVATE, -1, NULL);
    inherit("shared", 3 * MIB, kOfAll, MAP_SHARED, -1, NULL);
    inherit("memfd", 3 * MIB, kOfAll, MAP_SHARED, make_file(NULL, "of-all", 3 * MIB, true, NULL),
            NULL);
}

static void make_for_group(void) {
    static char path[PATH_MAX], on_tmpfs[PATH_MAX], on_disk[PATH_MAX];
    const size_t small = 128 << 10;
    inherit("cow-mapping", 2 * MIB, kCopied, MAP_PRIVATE, -1, NULL);
    inherit("shared-of-group", 2 * MIB, kOfGroup, MAP_SHARED, -1, NULL);
    inherit("memfd-of-group", 2 * MIB, kOfGroup, MAP_SHARED,
            make_file(NULL, "of-group", 2 * MIB, true, path), NULL);
    inherit("memfd-unmapped", small, kOfGroup, 0, make_file(NULL, "unmapped", small, true, path),
            NULL);
    for (int mapped = 0; mapped < 2; ++mapped) {
        const int flags = mapped ? MAP_SHARED : 0;
        inherit(mapped ? "ghost-on-tmpfs-mapped" : "ghost-on-tmpfs", small, kOfGroup, flags,
                make_file(tmpfs, "ghost", small, false, path), NULL);
        inherit(mapped ? "ghost-on-disk-mapped" : "ghost-on-disk", small, kOfGroup, flags,
                make_file(disk, "ghost", small, false, path), NULL);
    }
    const int file = make_file(tmpfs, "file", small, true, on_tmpfs);
    inherit("file-on-tmpfs", small, kOfGroup, 0, file, on_tmpfs);
    inherit("file-on-disk", small, kOfGroup, 0, make_file(disk, "file", small, true, on_disk),
            NULL);
}

/* Descriptors and memory that no other process has. */
static void make_own(bool cuda) {
    for (int i = 0; i < area_count; ++i) {
        char path[40];
        snprintf(path, sizeof path, "/proc/self/fd/%d", areas[i].kept);
        if (areas[i].kept >= 0)
            REQUIRE((areas[i].fd = open(path, O_RDWR | O_CLOEXEC)) >= 0);
    }
    const uint64_t own = word(seed, 1000 + (uint64_t)self);
    const size_t bytes[] = {3 * MIB, 512 << 10, 2 * MIB, 4 * MIB};
    struct area area = {"private", bytes[0], own,  kOwn, map(bytes[0], MAP_PRIVATE, -1),
                        -1,        -1,       NULL, 0};
    struct area more = {"heap", bytes[1], own + 1, kOwn, heap(bytes[1]), -1, -1, NULL, 0};
    struct area alike = {"alike", bytes[2], seed, kOwn, map(bytes[2], MAP_PRIVATE, -1),
                         -1,      -1,       NULL, 0};
    add(area), add(more), add(alike);
    if (cuda) {
        struct area gpu = {"gpu", bytes[3], own + 2, kOwn, NULL, -1, -1, NULL, 0};
        CUdevice device;
        CUcontext context;
        CUDA(cuInit(0));
        CUDA(cuDeviceGet(&device, 0));
        CUDA(cuDevicePrimaryCtxRetain(&context, device));
        CUDA(cuCtxSetCurrent(context));
        CUDA(cuMemAlloc(&gpu.gpu, gpu.bytes));
        add(gpu);
    }
    for (int i = area_count - (cuda ? 4 : 3); i < area_count; ++i)
        write_all(&areas[i]);
}

/* What --wrong asks for. before: this process has written in this round. */
static void spoil(bool before) {
    for (int i = 0; i < area_count; ++i) {
        struct area* area = &areas[i];
        char unshared[80];
        snprintf(unshared, sizeof unshared, "%s-unshared", area->kind);
        const size_t middle = area->bytes / 16 + kWords / 2;
        if (!before && is_wrong(area->kind)) {
            const uint64_t other = content(area)[middle] ^ 1u << 20;
            put(area, middle, &other, 1);
        }
        if (before && is_wrong(unshared) && area->at != NULL) {
            uint64_t* copy = map(area->bytes, MAP_PRIVATE, -1);
            memcpy(copy, area->at, area->bytes);
            REQUIRE(mremap(copy, area->bytes, area->bytes, MREMAP_MAYMOVE | MREMAP_FIXED,
                           area->at) == area->at);
        }
        if (strcmp(area->kind, "ghost-on-disk") != 0 || before)
            continue;
        if (is_wrong("own-offset"))
            REQUIRE(lseek(area->fd, 1, SEEK_CUR) > 0);
        if (is_wrong("shared-offset"))
            REQUIRE(lseek(area->kept, 1, SEEK_CUR) > 0);
        if (is_wrong("one-descriptor-of-two"))
            REQUIRE(dup2(area->kept, area->fd) == area->fd);
    }
    uint64_t lost;
    if (!before && is_wrong("pipe"))
        REQUIRE(read(from_parent, &lost, sizeof lost) == sizeof lost);
}

static void run(void) {
    pthread_t handle;
    thread_count = (unsigned)self % (kMaxThreads + 1);
    for (unsigned i = 0; i < thread_count; ++i) {
        threads[i] = (struct thread){i, word(seed, 2000 + (uint64_t)self * 10 + i) & ~1ull, 0};
        REQUIRE(pthread_create(&handle, NULL, run_thread, &threads[i]) == 0);
    }
    for (this_round = 1;; ++this_round) {
        spoil(true);
        for (int i = 0; i < area_count; ++i)
            write_slots(&areas[i]), set_offsets(&areas[i]);
        write_pipes();
        let_threads(this_round * 2);
        while (is_wrong("thread-gone") && count_threads() == threads_wanted)
            usleep(1000); /* who has returned is listed for a moment still */
        if (threads_wanted == 0)
            threads_wanted = count_threads(); /* the driver's too */
        common->threads[self] = count_threads();
        if (common->threads[self] != threads_wanted || threads_wanted < 1 + thread_count)
            fail("thread-gone", 0, common->threads[self], threads_wanted);
        await_all();
        spoil(false);
        for (int i = 0; i < area_count; ++i)
            check(&areas[i]);
        let_threads(this_round * 2 + 1);
        if (self != 0)
            read_pipe();
        await_all();
        if (self == 0) {
            unsigned all = 0;
            for (int i = 0; i < kProcesses; ++i)
                all += common->threads[i];
            printf("round %u ok: %d processes, %u threads\n", this_round, kProcesses, all);
            fflush(stdout);
        }
        usleep(kRoundPause);
    }
}

/* Fork a child of that number; true in the child. */
static bool have_child(int number) {
    int ends[2];
    const pid_t parent = getpid();
    REQUIRE(pipe2(ends, O_CLOEXEC) == 0);
    const pid_t pid = fork();
    REQUIRE(pid >= 0);
    if (pid > 0) {
        close(ends[0]);
        to_child[children] = ends[1], child_numbers[children++] = number;
        return false;
    }
    prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
    if (getppid() != parent)
        _exit(0);
    for (int i = 0; i < children; ++i)
        close(to_child[i]);
    children = 0, self = number;
    close(ends[1]);
    if (from_parent >= 0)
        close(from_parent);
    from_parent = ends[0];
    return true;
}

int main(int argc, char** argv) {
    bool cuda = true;
    wrong_in = 46;
    for (int i = 1; i + 1 < argc; i += 2) {
        const char *name = argv[i], *value = argv[i + 1];
        if (strcmp(name, "--disk") == 0)
            disk = value;
        else if (strcmp(name, "--tmpfs") == 0)
            tmpfs = value;
        else if (strcmp(name, "--seed") == 0)
            seed = word(strtoul(value, NULL, 10), 0);
        else if (strcmp(name, "--cuda") == 0)
            cuda = strcmp(value, "0") != 0;
        else if (strcmp(name, "--wrong") == 0)
            wrong = value;
        else if (strcmp(name, "--wrong-in") == 0)
            wrong_in = (int)strtol(value, NULL, 10);
        else
            REQUIRE(!"an option that it has");
    }
    REQUIRE(disk != NULL && tmpfs != NULL);
    REQUIRE(mallopt(M_MMAP_THRESHOLD, 64 << 20) == 1);
    make_for_all();
    for (int number = 1; number < kProcesses && group < 0; number += kMembers) {
        if (!have_child(number))
            continue;
        group = number / kMembers;
        make_for_group();
        for (int leaf = 1; leaf < kMembers && !have_child(number + leaf);)
            ++leaf;
    }
    make_own(cuda && (self == 3 || self == 33));
    run();
}
