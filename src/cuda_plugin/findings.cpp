// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/findings.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstring>
#include <sstream>
#include <utility>

namespace gpustasis {
namespace {

// API versions of the driver branches after 580, and of 610. Measured were 580.178, which survives what
// is found here, and 595.84, which does not: the branches between and after count as the latter.
constexpr std::uint32_t kLast580 = 13000;
constexpr std::uint32_t kFirst610 = 13030;

// The process needs some memory besides, and so do the others of its cgroup.
constexpr std::uint64_t kMargin = std::uint64_t{64} << 20;
// A v1 cgroup without a limit has the largest number of pages.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;

std::string mib(std::uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

/// A CUDA process has /dev/nvidia-uvm open, and at most one mapping of it, unless it has managed memory.
bool maps_managed_memory(pid_t pid) {
    std::istringstream maps(proc::read_file("/proc/" + std::to_string(pid) + "/maps"));
    int count = 0;
    for (std::string line; std::getline(maps, line);)
        if (line.ends_with("/dev/nvidia-uvm"))
            ++count;
    return count > 1;
}

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

} // namespace

void require_answering(pid_t pid, pid_t tid) {
    const char state = proc::state(tid);
    if (state == 'T')
        throw Error(Errc::unsupported, "the process is stopped, and the driver would wait for ever "
                                       "for its thread " +
                                           std::to_string(tid) + "; continue it (kill -CONT " +
                                           std::to_string(pid) + ") first");
    if (state == 't')
        throw Error(Errc::unsupported, "its thread " + std::to_string(tid) +
                                           " is stopped by process " +
                                           std::to_string(proc::tracer_of(tid)) +
                                           ", which traces it, and the driver would wait for ever "
                                           "for that thread; end the tracer first");
}

std::vector<Finding> find_risks(pid_t pid, std::uint32_t api_version, std::size_t cuda_tasks) {
    std::vector<Finding> found;
    if (api_version <= kLast580)
        return found; // it gives an error, and the job runs on
    if (maps_managed_memory(pid))
        found.push_back({risk::kManagedMemory,
                         "it has managed memory (more than one mapping of /dev/nvidia-uvm), which "
                         "drivers newer than 580 destroy when they are asked to checkpoint it; "
                         "allocate with cudaMalloc instead of cudaMallocManaged"});
    if (proc::has_thread_named(pid, "pt_nccl_watchdg") ||
        proc::has_thread_named(pid, "pt_nccl_heartbt"))
        found.push_back({risk::kNccl,
                         "it is a member of an NCCL process group (thread pt_nccl_watchdg or "
                         "pt_nccl_heartbt), which drivers newer than 580 abort when they are asked "
                         "to checkpoint it; end the group first (destroy_process_group)"});
    if (cuda_tasks > 1 && api_version < kFirst610)
        found.push_back(
            {risk::kIpc,
             "the tree has more than one CUDA process, and nothing tells from outside "
             "whether they share memory by CUDA IPC: drivers newer than 580 and before 610 "
             "kill those that do; use another driver"});
    return found;
}

std::optional<Finding> StagingRoom::add(pid_t pid, std::uint64_t bytes) {
    const std::string proc_directory = root_ + "/proc/";
    const auto ask = [&](const std::string& place, std::uint64_t room,
                         const std::string& what) -> std::optional<Finding> {
        const std::uint64_t wanted = asked_[place] += bytes;
        if (bytes == 0 || wanted + kMargin <= room)
            return std::nullopt;
        return Finding{risk::kMemory,
                       "the driver stages " + mib(wanted) + " of GPU memory in host memory, and " +
                           what + " has room for " + mib(room) + " (" + mib(kMargin) +
                           " are to stay free): the kernel would kill the job; raise the limit or "
                           "free memory"};
    };
    const std::string mountinfo = proc::read_file(proc_directory + "self/mountinfo");
    std::istringstream lines(proc::read_file(proc_directory + std::to_string(pid) + "/cgroup"));
    std::optional<Finding> found;
    for (std::string line; std::getline(lines, line);) {
        for (const bool v2 : {false, true}) {
            auto path = cgroup_path(line, v2);
            const auto mount = path ? find_mount(mountinfo, v2) : std::nullopt;
            if (!mount)
                continue;
            if (mount->root != "/" && path->starts_with(mount->root))
                path->erase(0, mount->root.size());
            // Each level up to the root may have a limit of its own.
            std::string level = *path == "/" ? "" : *path;
            for (bool above = true; above; level.erase(std::min(level.rfind('/'), level.size()))) {
                const std::string directory = root_ + mount->point + level;
                const auto room = headroom(directory, v2 ? kV2 : kV1);
                if (const auto full =
                        room ? ask(directory, *room, "cgroup " + level + "/") : std::nullopt;
                    full && !found)
                    found = full;
                above = !level.empty();
            }
        }
    }
    const std::uint64_t free = value_of(proc_directory + "meminfo", "MemAvailable:") << 10;
    if (const auto full = ask("", free, "this host"); full && !found)
        found = full;
    return found;
}

std::vector<std::string> take_risks(pid_t pid, std::uint32_t api_version, std::size_t cuda_tasks,
                                    const ProcessGpus& gpus, StagingRoom& room,
                                    const Config& config) {
    const std::string who = "pid " + std::to_string(pid);
    if (gpus.source != GpuSource::nvml)
        host::info(who + ": how much GPU memory it uses is not known (" + gpus.why_not_all +
                   "): no check that host memory has room for it");
    std::vector<Finding> findings = find_risks(pid, api_version, cuda_tasks);
    if (const auto full = room.add(pid, gpus.memory_size()))
        findings.push_back(*full);
    std::vector<std::string> taken;
    for (const Finding& finding : findings) {
        if (std::ranges::find(config.risk, finding.risk) == config.risk.end())
            throw Error(Errc::unsupported, finding.text + "; or name \"" + finding.risk +
                                               "\" in risk, in the configuration, to try it all "
                                               "the same");
        taken.push_back(who + ": " + finding.risk + ": " + finding.text);
        host::warn("risk taken: " + taken.back());
    }
    return taken;
}

} // namespace gpustasis
