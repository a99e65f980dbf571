// SPDX-License-Identifier: Apache-2.0
#include "driver_emulator/driver/helper_threads.hpp"

#include "driver_emulator/driver/futex.hpp"

#include <csignal>
#include <cstdint>
#include <cstring>
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

// As malloc and pthread_create of a C library leave them behind, on whose threads a driver may do
// this work (580.159.04 leaves none): an arena at a multiple of 64 MiB, its tail reserved, and a stack
// above a guard, kept for the next thread. Neither is staging.
constexpr std::size_t kArenaBytes = std::size_t{64} << 20;
constexpr std::size_t kArenaUsedBytes = std::size_t{2} << 20;
constexpr std::size_t kCachedStackBytes = std::size_t{8} << 20;
constexpr std::size_t kGuardBytes = 4096;
void* arena = nullptr;
void* cached_stack = nullptr;

void* reserve(std::size_t size) noexcept {
    void* memory = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    return memory == MAP_FAILED ? nullptr : memory;
}

void make_arena() noexcept {
    char* room = static_cast<char*>(reserve(2 * kArenaBytes));
    if (room == nullptr) {
        return;
    }
    const std::size_t skipped = kArenaBytes - reinterpret_cast<std::uintptr_t>(room) % kArenaBytes;
    munmap(room, skipped);
    if (skipped != kArenaBytes) {
        munmap(room + skipped + kArenaBytes, kArenaBytes - skipped);
    }
    arena = room + skipped;
    mprotect(arena, kArenaUsedBytes, PROT_READ | PROT_WRITE);
}

int run_task(void* argument) {
    // Not the restore thread's name, which callers search for.
    syscall(SYS_prctl, PR_SET_NAME, "cuda-staging", 0, 0, 0);
    const Task& task = *static_cast<const Task*>(argument);
    task.body(task.argument);
    return 0;
}

// Larger than what counts as too small for staging, without a guard, all of it in use.
constexpr std::size_t kLingeringBytes = std::size_t{2} << 20;
Thread lingering;
std::uint64_t lingering_until_ns = 0;

void use_stack(void*) noexcept {
    auto* words = static_cast<volatile std::uint64_t*>(lingering.stack);
    constexpr std::size_t kWords = (kLingeringBytes - kStackBytes) / sizeof *words;
    for (std::uint64_t round = 1; now_ns() < lingering_until_ns; ++round) {
        for (std::size_t i = 0; i < kWords; ++i) {
            words[i] = i * round;
        }
        futex_wait(lingering.id, 1, 5);
        for (std::size_t i = 0; i < kWords; ++i) {
            if (words[i] != i * round) {
                syscall(SYS_kill, getpid(), SIGABRT);
            }
        }
    }
}

bool start(Thread& thread, Task& task, std::size_t stack_bytes = kStackBytes) noexcept {
    thread.stack = mmap(nullptr, stack_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_STACK, -1, 0);
    if (thread.stack == MAP_FAILED) {
        return false;
    }
    constexpr int kFlags = CLONE_VM | CLONE_FS | CLONE_FILES | CLONE_SIGHAND | CLONE_THREAD |
                           CLONE_SYSVSEM | CLONE_CHILD_CLEARTID;
    thread.id = 1;
    thread.tid = clone(run_task, static_cast<char*>(thread.stack) + stack_bytes, kFlags, &task,
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

void HelperThreads::leave_memory() noexcept {
    if (arena == nullptr) {
        make_arena();
    }
    if (cached_stack == nullptr) {
        cached_stack = reserve(kGuardBytes + kCachedStackBytes);
        if (cached_stack != nullptr) {
            mprotect(static_cast<char*>(cached_stack) + kGuardBytes, kCachedStackBytes,
                     PROT_READ | PROT_WRITE);
        }
    }
    if (arena != nullptr) {
        std::memset(arena, 0x5a, kGuardBytes);
    }
    if (cached_stack != nullptr) {
        std::memset(static_cast<char*>(cached_stack) + kCachedStackBytes, 0x5a, kGuardBytes);
    }
}

void HelperThreads::linger(std::uint32_t milliseconds) noexcept {
    if (lingering.stack != MAP_FAILED && lingering.id.load() == 0) {
        munmap(lingering.stack, kLingeringBytes); // of one that has ended
        lingering.stack = MAP_FAILED;
    }
    if (milliseconds == 0 || lingering.stack != MAP_FAILED) {
        return;
    }
    static Task task{use_stack, nullptr};
    lingering_until_ns = now_ns() + std::uint64_t{milliseconds} * 1'000'000;
    start(lingering, task, kLingeringBytes);
}

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
