// SPDX-License-Identifier: Apache-2.0
/// The kernel's wait-on-address, without the C library's locks.
#pragma once

#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <ctime>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace gpustasis::emulator {

[[nodiscard]] inline std::uint64_t now_ns() noexcept {
    timespec time{};
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<std::uint64_t>(time.tv_sec) * 1'000'000'000 +
           static_cast<std::uint64_t>(time.tv_nsec);
}

inline void sleep_ms(std::uint32_t milliseconds) noexcept {
    timespec time{static_cast<time_t>(milliseconds / 1000),
                  static_cast<long>(milliseconds % 1000) * 1'000'000};
    while (nanosleep(&time, &time) != 0 && errno == EINTR) {
    }
}

/// Sleeps while the word is `value`, at most `milliseconds` (0 = for ever). Wakes early at will.
inline void futex_wait(const std::atomic<std::uint32_t>& word, std::uint32_t value,
                       std::uint32_t milliseconds) noexcept {
    const timespec time{static_cast<time_t>(milliseconds / 1000),
                        static_cast<long>(milliseconds % 1000) * 1'000'000};
    syscall(SYS_futex, &word, FUTEX_WAIT, value, milliseconds == 0 ? nullptr : &time, nullptr, 0);
}

inline void futex_wake(const std::atomic<std::uint32_t>& word) noexcept {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

} // namespace gpustasis::emulator
