// SPDX-License-Identifier: Apache-2.0
/// Errors of the system that are not about the file at hand.
#pragma once

#include "core/error.hpp"

#include <utility>

namespace gpustasis::seal {

/// Memory for keys cannot be had or locked.
class KeyMemoryError : public Error {
public:
    explicit KeyMemoryError(const Error& cause) : Error(cause, cause.what()) {}
};

/// What is made cannot be written; what it is made of is not to blame.
class OutputError : public Error {
public:
    explicit OutputError(const Error& cause) : Error(cause, cause.what()) {}
};

/// What `work` gives; an Error of it is an OutputError.
template <class Work>
decltype(auto) writing(Work&& work) {
    try {
        return std::forward<Work>(work)();
    } catch (const Error& error) {
        throw OutputError(error);
    }
}

} // namespace gpustasis::seal
