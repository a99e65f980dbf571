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

/// Those that thread `tid` of it has made; of one that is gone, none.
std::vector<pid_t> children_of(pid_t pid, pid_t tid) {
    try {
        std::istringstream list(read_file("/proc/" + std::to_string(pid) + "/task/" +
                                          std::to_string(tid) + "/children"));
        return {std::istream_iterator<pid_t>(list), {}};
    } catch (const Error&) {
        return {};
    }
}

/// The kernel calls a thread dead in the same moment in which another one gets its children (exit_notify in
/// kernel/exit.c).
bool is_dead(pid_t tid) {
    try {
        const char now = state(tid);
        return now == 'Z' || now == 'X' || now == 'x';
    } catch (const Error&) {
        return true;
    }
}

} // namespace

std::vector<pid_t> tree(pid_t root) {
    std::vector<pid_t> found;
    std::set<pid_t> known{root};
    std::vector<pid_t> next{root};
    for (std::size_t i = 0; i < next.size(); ++i) {
        // A thread that ends leaves its children to another one of the process, which may have been asked by then. So all
        // is known once whoever is dead behind a look was dead before it.
        std::set<pid_t> dead;
        bool all = false;
        for (int look = 0; look < kLooks && !all; ++look) {
            std::vector<pid_t> tids;
            try {
                tids = threads(next[i]);
            } catch (const Error&) {
                break; // it has ended, and what it had made is another's
            }
            if (look == 0)
                found.push_back(next[i]);
            for (const pid_t tid : tids)
                std::ranges::copy_if(children_of(next[i], tid), std::back_inserter(next),
                                     [&](pid_t pid) { return known.insert(pid).second; });
            all = true;
            for (const pid_t tid : tids)
                if (is_dead(tid))
                    all = !dead.insert(tid).second && all;
        }
    }
    return found;
}

} // namespace gpustasis::proc
