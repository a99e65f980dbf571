// SPDX-License-Identifier: Apache-2.0
/// A host that is not this one, for what is read of /proc and of cgroups.
#pragma once

#include "sample.hpp"

#include <sys/types.h>

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <string>

namespace sample {

constexpr std::uint64_t kMib = 1 << 20;
constexpr pid_t kPid = 7;

/// A root with a /proc and cgroups of our own making.
class Root {
public:
    Root() {
        put("/proc/self/mountinfo", "31 23 0:28 / /cg rw - tmpfs tmpfs rw\n"
                                    "35 31 0:32 / /cg/memory rw - cgroup cgroup rw,memory\n"
                                    "41 31 0:38 /pod /cg/v2 rw,relatime - cgroup2 cgroup2 rw\n");
        put("/proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 1048576 kB\n"); // 1 GiB
    }
    const std::string& path() const { return path_; }
    void put(const std::string& name, const std::string& text) const {
        std::filesystem::create_directories(std::filesystem::path(path_ + name).parent_path());
        std::ofstream(path_ + name) << text;
    }
    void cgroups(const std::string& text, pid_t pid = kPid) const {
        put("/proc/" + std::to_string(pid) + "/cgroup", text);
    }

private:
    sample::TempDir directory_;
    std::string path_ = directory_.path();
};

} // namespace sample
