// SPDX-License-Identifier: Apache-2.0
/// Short-lived threads made from the restore thread, gone before it replies, unless
/// one is to linger.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpustasis::emulator {

/// Not pthreads: creating one takes locks that a stopped thread may hold. They share the restore
/// thread's thread-local storage, so their body may only make system calls through syscall() and
/// touch memory of its own.
class HelperThreads {
public:
    static constexpr unsigned kMax = 4;

    /// Runs body(argument) in up to `count` threads at once and in the calling one; returns when
    /// all are done and no longer listed in /proc. Does with fewer threads if the system has no
    /// more.
    static void run(unsigned count, void (*body)(void*), void* argument) noexcept;

    /// Leaves behind what threads of a C library leave: a malloc arena and a stack kept for later. The
    /// next time these are used again.
    static void leave_memory() noexcept;

    /// Leaves one more behind, which uses its stack for that long and ends (0: makes none). It
    /// aborts the process if the stack is not what it has written there.
    static void linger(std::uint32_t milliseconds) noexcept;
};

} // namespace gpustasis::emulator
