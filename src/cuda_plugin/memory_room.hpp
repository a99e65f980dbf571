// SPDX-License-Identifier: Apache-2.0
/// How much memory of the host a process can take before the kernel kills one for it.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

/// A limit that a process meets: that of one of its cgroups, or the memory of the host.
struct MemoryLevel {
    std::string place;      ///< directory of the cgroup; empty: the host
    std::string name;       ///< "cgroup /pod/job/" or "this host"
    std::uint64_t room = 0; ///< bytes that may still be taken
};

/// Those of `process`, which is "self" or a pid: of its cgroups (v1 and v2, each level) those that have a
/// limit, then the host. `root` is put before /proc and before the mount points of the cgroups: for tests.
/// Throws Error: io if the process is gone.
std::vector<MemoryLevel> memory_levels(const std::string& process, const std::string& root = "");

/// All memory of the host, bytes. `root`: as above. Throws Error: io if /proc/meminfo does not say.
std::uint64_t host_memory(const std::string& root = "");

/// How much this process may put into a directory in memory: most of what is left at each of its levels, less
/// what others, who meet the same level, are to get back meanwhile.
class MemoryLimit {
public:
    /// `root`: as of memory_levels.
    explicit MemoryLimit(std::string root = "") : root_(std::move(root)) {}

    /// `bytes` were taken out of process `pid`, and may be put back at any time. Throws Error: io if it is
    /// gone.
    void keep_for(pid_t pid, std::uint64_t bytes);

    /// All of what keep_for() was told of.
    std::uint64_t kept() const noexcept { return all_kept_; }

    /// As things are now. Throws Error: io.
    std::uint64_t now() const;

private:
    std::string root_;
    std::map<std::string, std::uint64_t> kept_; ///< by place of the level
    std::uint64_t all_kept_ = 0;
};

} // namespace gpustasis
