// SPDX-License-Identifier: Apache-2.0
/// The one exception type the core throws.
#pragma once

#include <stdexcept>
#include <string>
#include <system_error>

namespace gpustasis {

/// Why an operation failed. Code branches on this; people read what().
enum class Errc {
    bad_argument, ///< the caller broke a documented precondition
    corrupt_data, ///< stored bytes fail a checksum, a bound or a decoder
    unsupported,  ///< well formed, but needs a feature this build does not have
    io,           ///< the operating system refused; what() ends with strerror
    gone,         ///< the process has ended or has executed another program
};

class Error : public std::runtime_error {
public:
    Error(Errc code, const std::string& what, int error_number = 0)
        : std::runtime_error(what), code_(code), error_number_(error_number) {}
    /// `cause` in other words: of the same kind.
    Error(const Error& cause, const std::string& what)
        : Error(cause.code_, what, cause.error_number_) {}

    Errc code() const noexcept { return code_; }
    /// errno of what the operating system refused; 0: there is none.
    int error_number() const noexcept { return error_number_; }

private:
    Errc code_;
    int error_number_;
};

/// An Errc::io Error: "<what>: <strerror(error_number)>".
[[nodiscard]] inline Error io_error(const std::string& what, int error_number) {
    return {Errc::io, what + ": " + std::generic_category().message(error_number), error_number};
}

} // namespace gpustasis
