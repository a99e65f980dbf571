// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/low_descriptors.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <vector>

namespace gpustasis {
namespace {

/// One call for all between two that are criu's.
void give_back(const std::vector<int>& taken) noexcept {
    std::size_t first = 0;
    for (std::size_t i = 1; i <= taken.size(); ++i) {
        if (i < taken.size() && taken[i] == taken[i - 1] + 1)
            continue;
        if (::close_range(static_cast<unsigned>(taken[first]), static_cast<unsigned>(taken[i - 1]),
                          0) != 0)
            for (; first < i; ++first) // Linux before 5.9
                ::close(taken[first]);
        first = i;
    }
}

} // namespace

LowDescriptors::LowDescriptors() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_NOFILE, &limit) != 0)
        throw io_error("getrlimit RLIMIT_NOFILE", errno);
    const int first = static_cast<int>(std::min<rlim_t>(kFirst, limit.rlim_cur / 4));
    taken_.reserve(static_cast<std::size_t>(first)); // or one that was taken could be lost
    int next = ::open("/dev/null", O_PATH | O_CLOEXEC);
    while (0 <= next && next < first) {
        taken_.push_back(next);
        next = ::fcntl(next, F_DUPFD_CLOEXEC, next + 1);
    }
    const int error_number = errno;
    if (next < 0) {
        give_back(taken_);
        throw io_error("cannot take the low descriptors", error_number);
    }
    ::close(next);
}

LowDescriptors::~LowDescriptors() {
    give_back(taken_);
}

} // namespace gpustasis
