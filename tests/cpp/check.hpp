/// The whole C++ test framework: a failed CHECK prints where, and the process exits 1.
#pragma once

#include "core/error.hpp"

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
