// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/low_descriptors.hpp"

#include <fcntl.h>
#include <sys/resource.h>

#include <vector>

using gpustasis::LowDescriptors;
using gpustasis::UniqueFd;

namespace {

UniqueFd open_one() {
    return UniqueFd(::open("/dev/null", O_RDONLY | O_CLOEXEC));
}

void what_is_opened_meanwhile_is_above() {
    const int lowest = open_one().get();
    UniqueFd above;
    {
        const LowDescriptors low;
        above = open_one();
        CHECK(above.get() >= LowDescriptors::kFirst);
    }
    CHECK(above.get() >= LowDescriptors::kFirst);
    CHECK(open_one().get() == lowest); // all others are free again
}

void where_the_limit_is_low_most_is_left() {
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_NOFILE, &before) == 0);
    rlimit limit = before;
    limit.rlim_cur = 200;
    CHECK(::setrlimit(RLIMIT_NOFILE, &limit) == 0);
    {
        const LowDescriptors low;
        std::vector<UniqueFd> opened;
        for (int i = 0; i < 140; ++i)
            opened.push_back(open_one());
        CHECK(opened.front().get() >= 50 && opened.back());
    }
    CHECK(::setrlimit(RLIMIT_NOFILE, &before) == 0);
}

} // namespace

int main() {
    what_is_opened_meanwhile_is_above();
    where_the_limit_is_low_most_is_left();
}
