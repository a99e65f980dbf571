// SPDX-License-Identifier: Apache-2.0
#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <optional>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace gpustasis::proc {
namespace {

constexpr int kLooks = 20; // at the threads of a process

/// Whether it is gone, and not only hidden from a process that has no descriptor left.
bool is_gone(const std::string& path) noexcept {
    return ::access(path.c_str(), F_OK) != 0 && (errno == ENOENT || errno == ESRCH);
}

/// Those that thread `tid` of it has made; of one that is gone, none. nullopt: they cannot be read now.
std::optional<std::vector<pid_t>> children_of(pid_t pid, pid_t tid) {
    const std::string thread = "/proc/" + std::to_string(pid) + "/task/" + std::to_string(tid);
    try {
        std::istringstream list(read_file(thread + "/children"));
        return std::vector<pid_t>{std::istream_iterator<pid_t>(list), {}};
    } catch (const Error&) {
        return is_gone(thread) ? std::optional(std::vector<pid_t>{}) : std::nullopt;
    }
}

/// The kernel calls a thread dead in the same moment in which another one gets its children (exit_notify in
/// kernel/exit.c).
bool is_dead(pid_t tid) {
    try {
        const char now = state(tid);
        return now == 'Z' || now == 'X' || now == 'x';
    } catch (const Error&) {
        return is_gone("/proc/" + std::to_string(tid));
    }
}

} // namespace

std::vector<pid_t> tree(pid_t root) {
    std::vector<pid_t> found;
    std::set<pid_t> known{root};
    std::vector<pid_t> next{root};
    for (std::size_t i = 0; i < next.size(); ++i) {
        // A thread that ends leaves its children to another one of the process, which may have been asked by then. A child
        // that is waited for, where it stands in the list that is read, takes the place of another one with it
        // (get_children_pid in fs/proc/array.c). So all is known once whoever is gone behind a look was gone before it.
        std::set<pid_t> gone;
        bool all = false;
        for (int look = 0; look < kLooks && !all; ++look) {
            std::vector<pid_t> tids;
            try {
                tids = threads(next[i]);
            } catch (const Error&) {
                if (is_gone("/proc/" + std::to_string(next[i])))
                    break; // and what it had made is another's
                continue;
            }
            if (found.empty() || found.back() != next[i])
                found.push_back(next[i]);
            all = true;
            std::vector<pid_t> listed;
            for (const pid_t tid : tids)
                if (const auto children = children_of(next[i], tid))
                    listed.insert(listed.end(), children->begin(), children->end());
                else
                    all = false;
            for (const pid_t tid : tids)
                if (is_dead(tid))
                    all = !gone.insert(tid).second && all;
            for (const pid_t child : listed) {
                if (is_gone("/proc/" + std::to_string(child)))
                    all = !gone.insert(child).second && all;
                if (known.insert(child).second)
                    next.push_back(child);
            }
        }
    }
    return found;
}

} // namespace gpustasis::proc
