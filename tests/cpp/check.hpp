// SPDX-License-Identifier: Apache-2.0
/// The whole C++ test framework: a failed CHECK prints where, and the process exits 1.
#pragma once

#include "core/error.hpp"

#include <sys/prctl.h>
#include <sys/types.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>

#define CHECK(cond)                                                                                \
    do {                                                                                           \
        if (!(cond)) {                                                                             \
            std::fprintf(stderr, "%s:%d: CHECK(%s) failed\n", __FILE__, __LINE__, #cond);          \
            std::exit(1);                                                                          \
        }                                                                                          \
    } while (0)

/// CHECK that `expr` throws gpustasis::Error with the given code.
#define CHECK_THROWS(errc, expr)                                                                   \
    do {                                                                                           \
        try {                                                                                      \
            static_cast<void>(expr);                                                               \
            CHECK(false && "nothing was thrown");                                                  \
        } catch (const gpustasis::Error& check_error) {                                            \
            if (check_error.code() != (errc))                                                      \
                std::fprintf(stderr, "thrown: %s\n", check_error.what());                          \
            CHECK(check_error.code() == (errc));                                                   \
        }                                                                                          \
    } while (0)

/// Under a sanitizer, which makes everything slow, a long campaign tries every kStride-th case only: the
/// sanitizer looks for bad accesses, and as built every case is tried. A prime, so that each bit of a
/// byte has its turn.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr int kStride = 7;
#else
inline constexpr int kStride = 1;
#endif

/// fork() of a child that dies with the test: a failed one leaves no process behind, which would hold
/// the output open that the test's caller reads.
inline pid_t fork_child() {
    const pid_t parent = ::getpid();
    const pid_t child = ::fork();
    if (child == 0 && (::prctl(PR_SET_PDEATHSIG, SIGKILL) != 0 || ::getppid() != parent))
        ::_exit(1);
    return child;
}

/// Waits until `condition()` holds, 30 s at most; whether it does.
template <class Condition>
bool comes_true(Condition&& condition) {
    for (int tick = 0; tick < 30'000; ++tick) {
        if (condition())
            return true;
        ::usleep(1000);
    }
    return condition();
}
