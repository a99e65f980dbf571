// SPDX-License-Identifier: Apache-2.0
/// The one exception type the core throws.
#pragma once

#include <stdexcept>
#include <string>

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
    Error(Errc code, const std::string& what) : std::runtime_error(what), code_(code) {}
    Errc code() const noexcept { return code_; }

private:
    Errc code_;
};

/// An Errc::io Error: "<what>: <strerror(error_number)>".
[[nodiscard]] Error io_error(const std::string& what, int error_number);

} // namespace gpustasis
