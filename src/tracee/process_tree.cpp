// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <algorithm>
#include <iterator>
#include <set>
#include <sstream>
#include <string>

namespace gpustasis::proc {
namespace {

constexpr int kLooks = 20; // at the threads of a process

/// Those that thread `tid` of it has made. Throws Error: io.
std::vector<pid_t> children_of(pid_t pid, pid_t tid) {
    std::istringstream list(
        read_file("/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid) + "/children"));
    return {std::istream_iterator<pid_t>(list), {}};
}

} // namespace

std::vector<pid_t> tree(pid_t root) {
    std::vector<pid_t> found;
    std::set<pid_t> known{root};
    std::vector<pid_t> next{root};
    for (std::size_t i = 0; i < next.size(); ++i) {
        bool all = false;
        // A thread that ends leaves its children to another one of the process, which may have been asked by then.
        for (int look = 0; look < kLooks && !all; ++look) {
            all = true;
            std::vector<pid_t> tids;
            try {
                tids = threads(next[i]);
            } catch (const Error&) {
                break; // it has ended, and what it had made is another's
            }
            if (look == 0)
                found.push_back(next[i]);
            for (const pid_t tid : tids) {
                std::vector<pid_t> below;
                try {
                    below = children_of(next[i], tid);
                } catch (const Error&) {
                    all = false;
                }
                std::ranges::copy_if(below, std::back_inserter(next),
                                     [&](pid_t pid) { return known.insert(pid).second; });
            }
        }
    }
    return found;
}

} // namespace gpustasis::proc
