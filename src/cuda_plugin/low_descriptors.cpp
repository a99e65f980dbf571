// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/low_descriptors.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/resource.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace gpustasis {

LowDescriptors::LowDescriptors() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0)
        throw io_error("getrlimit RLIMIT_NOFILE", errno);
    const int first = static_cast<int>(std::min<rlim_t>(kFirst, limit.rlim_cur / 4));
    UniqueFd next(::open("/dev/null", O_PATH | O_CLOEXEC));
    while (next && next.get() < first) {
        taken_.push_back(std::move(next));
        next = UniqueFd(::fcntl(taken_.back().get(), F_DUPFD_CLOEXEC, 0));
    }
    if (!next)
        throw io_error("cannot take the low descriptors", errno);
}

} // namespace gpustasis
