// SPDX-License-Identifier: Apache-2.0
#include "core/random_id.hpp"

#include "core/error.hpp"

#include <sys/random.h>

#include <cerrno>

namespace gpustasis {

Id random_id() {
    Id id{};
    if (::getrandom(id.data(), id.size(), 0) != static_cast<ssize_t>(id.size()))
        throw io_error("getrandom", errno);
    return id;
}

} // namespace gpustasis
