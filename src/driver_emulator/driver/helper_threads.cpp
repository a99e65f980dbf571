#include "driver_emulator/driver/helper_threads.hpp"

#include "driver_emulator/driver/futex.hpp"

#include <sched.h>
#include <sys/mman.h>
#include <sys/prctl.h>

namespace gpustasis::emulator {
namespace {

constexpr std::size_t kStackBytes = 65536;

struct Task {
    void (*body)(void*);
    void* argument;
};

struct Thread {
    std::atomic<std::uint32_t> id{0}; ///< cleared, and woken, by the kernel when it exits
    int tid = 0;
    void* stack = MAP_FAILED;
};

int run_task(void* argument) {
    // Not the restore thread's name, which callers search for.
    syscall(SYS_prctl, PR_SET_NAME, "cuda-staging", 0, 0, 0);
    const Task& task = *static_cast<const Task*>(argument);
    task.body(task.argument);
    return 0;
}

bool start(Thread& thread, Task& task) noexcept {
    thread.stack = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (thread.stack == MAP_FAILED) {
        return false;
    }
    constexpr int kFlags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
                           CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    thread.id = 1;
    thread.tid = clone(run_task, static_cast<char*>(thread.stack) + kStackBytes, kFlags, &task,
                       nullptr, nullptr, &thread.id);
    return thread.tid > 0;
}

void join(Thread& thread) noexcept {
    if (thread.tid > 0) {
        while (thread.id.load() != 0) {
            futex_wait(thread.id, 1, 50);
        }
        // The word is cleared a moment before the thread leaves the process's list.
        while (syscall(SYS_tgkill, getpid(), thread.tid, 0) == 0) {
            syscall(SYS_sched_yield);
        }
    }
    if (thread.stack != MAP_FAILED) {
        munmap(thread.stack, kStackBytes);
    }
}

} // namespace

void HelperThreads::run(unsigned count, void (*body)(void*), void* argument) noexcept {
    Thread threads[kMax];
    Task task{body, argument};
    for (unsigned i = 0; i < count && i < kMax; ++i) {
        if (!start(threads[i], task)) {
            break;
        }
    }
    body(argument);
    for (Thread& thread : threads) {
        join(thread);
    }
}

} // namespace gpustasis::emulator
