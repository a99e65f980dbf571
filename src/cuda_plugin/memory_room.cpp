// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/memory_room.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <limits>
#include <optional>
#include <sstream>
#include <system_error>

namespace gpustasis {
namespace {

// A v1 cgroup without a limit has the largest number of pages.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;

std::optional<std::uint64_t> number(const std::string& text) {
    std::uint64_t value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    return error == std::errc{} && end != text.data() ? std::optional(value) : std::nullopt;
}

/// nullopt: there is no such file, or no number in it.
std::optional<std::uint64_t> number_in(const std::string& path) {
    try {
        return number(proc::read_file(path));
    } catch (const Error&) {
        return std::nullopt;
    }
}

/// The number behind `key` in a file of lines "key number"; 0 if there is none.
std::uint64_t value_of(const std::string& path, const std::string& key) {
    try {
        std::istringstream text(proc::read_file(path));
        for (std::string word; text >> word;)
            if (word == key && text >> word)
                return number(word).value_or(0);
    } catch (const Error&) {
        return 0;
    }
    return 0;
}

/// The files of one version of cgroups.
struct Version {
    const char* limit;
    const char* usage;
    std::array<const char*, 2> reclaimable; ///< in memory.stat: pages of files, given up first
};
constexpr Version kV1 = {
    "memory.limit_in_bytes", "memory.usage_in_bytes", {"total_inactive_file", "total_active_file"}};
constexpr Version kV2 = {"memory.max", "memory.current", {"inactive_file", "active_file"}};

/// Bytes that may still be charged to the cgroup at `directory`; nullopt: it has no limit.
std::optional<std::uint64_t> headroom(const std::string& directory, const Version& version) {
    const auto limit = number_in(directory + "/" + version.limit);
    const auto usage = number_in(directory + "/" + version.usage);
    if (!limit || !usage || *limit >= kNoLimit)
        return std::nullopt;
    std::uint64_t reclaimable = 0;
    for (const char* key : version.reclaimable)
        reclaimable += value_of(directory + "/memory.stat", key);
    const std::uint64_t fixed = *usage > reclaimable ? *usage - reclaimable : 0;
    return *limit > fixed ? *limit - fixed : 0;
}

/// Where a hierarchy with the memory controller is mounted, and which cgroup is its root there.
struct Mount {
    std::string point;
    std::string root;
};

std::optional<Mount> find_mount(const std::string& mountinfo, bool v2) {
    std::istringstream lines(mountinfo);
    for (std::string line; std::getline(lines, line);) {
        std::istringstream words(line);
        std::string skipped;
        Mount mount;
        words >> skipped >> skipped >> skipped >> mount.root >> mount.point;
        while (words >> skipped && skipped != "-") {
        }
        std::string type;
        std::string options;
        words >> type >> skipped >> options;
        const bool has_memory = ("," + options + ",").find(",memory,") != std::string::npos;
        if (v2 ? type == "cgroup2" : type == "cgroup" && has_memory)
            return mount;
    }
    return std::nullopt;
}

/// The part of a line of /proc/PID/cgroup ("ID:CONTROLLERS:PATH") behind the second colon, if it is of
/// the wanted version.
std::optional<std::string> cgroup_path(const std::string& line, bool v2) {
    const std::size_t first = line.find(':');
    const std::size_t second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos)
        return std::nullopt;
    const std::string controllers = line.substr(first + 1, second - first - 1);
    const bool has_memory = ("," + controllers + ",").find(",memory,") != std::string::npos;
    if (v2 ? !controllers.empty() : !has_memory)
        return std::nullopt;
    return line.substr(second + 1);
}

/// Of the cgroup at `path` and of those above it: each may have a limit of its own.
void append_levels(const std::string& path, const Mount& mount, const std::string& root,
                   const Version& version, std::vector<MemoryLevel>& levels) {
    std::string level = path;
    if (mount.root != "/" && level.starts_with(mount.root))
        level.erase(0, mount.root.size());
    if (level == "/")
        level.clear();
    for (bool above = true; above; level.erase(std::min(level.rfind('/'), level.size()))) {
        std::string directory = root;
        directory.append(mount.point).append(level);
        if (const auto room = headroom(directory, version))
            levels.push_back({.place = directory, .name = "cgroup " + level + "/", .room = *room});
        above = !level.empty();
    }
}

} // namespace

std::vector<MemoryLevel> memory_levels(const std::string& process, const std::string& root) {
    const std::string proc_directory = root + "/proc/";
    const std::string mountinfo = proc::read_file(proc_directory + "self/mountinfo");
    std::istringstream lines(proc::read_file(proc_directory + process + "/cgroup"));
    std::vector<MemoryLevel> levels;
    for (std::string line; std::getline(lines, line);) {
        for (const bool v2 : {false, true}) {
            const auto path = cgroup_path(line, v2);
            const auto mount = find_mount(mountinfo, v2);
            if (path && mount)
                append_levels(*path, *mount, root, v2 ? kV2 : kV1, levels);
        }
    }
    levels.push_back({.place = "",
                      .name = "this host",
                      .room = value_of(proc_directory + "meminfo", "MemAvailable:") << 10});
    return levels;
}

std::uint64_t host_memory(const std::string& root) {
    const std::uint64_t kib = value_of(root + "/proc/meminfo", "MemTotal:");
    if (kib == 0)
        throw Error(Errc::io, "/proc/meminfo does not say how much memory this host has");
    return kib << 10;
}

std::uint64_t MemoryLimit::now() const {
    std::uint64_t limit = std::numeric_limits<std::uint64_t>::max();
    for (const MemoryLevel& level : memory_levels("self", root_)) {
        if (level.place.empty() && level.room == 0)
            throw Error(Errc::io, "/proc/meminfo does not say how much memory is available");
        const std::uint64_t most = level.room / 8 * 7;
        const auto kept = kept_.find(level.place);
        const std::uint64_t taken = kept == kept_.end() ? 0 : kept->second;
        limit = std::min(limit, most > taken ? most - taken : 0);
    }
    return limit;
}

void MemoryLimit::keep_for(pid_t pid, std::uint64_t bytes) {
    for (const MemoryLevel& level : memory_levels(std::to_string(pid), root_))
        kept_[level.place] += bytes;
    all_kept_ += bytes;
}

} // namespace gpustasis
