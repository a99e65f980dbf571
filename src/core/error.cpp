// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"

#include <system_error>

namespace gpustasis {

Error io_error(const std::string& what, int error_number) {
    return {Errc::io, what + ": " + std::generic_category().message(error_number)};
}

} // namespace gpustasis
