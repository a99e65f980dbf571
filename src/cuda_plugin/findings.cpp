// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/findings.hpp"

#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_room.hpp"
#include "cuda_plugin/proc.hpp"

#include <algorithm>
#include <cerrno>
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

bool is_of_ipc_job(pid_t pid) {
    const std::string name = "CUDA_CHECKPOINT_JOB_FILE=";
    try {
        const std::string environ = proc::read_file("/proc/" + std::to_string(pid) + "/environ");
        return environ.starts_with(name) || environ.find('\0' + name) != std::string::npos;
    } catch (const Error& e) {
        return e.error_number() != ENOENT && e.error_number() != ESRCH; // else it has ended
    }
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
    std::optional<Finding> found;
    for (const MemoryLevel& level : memory_levels(std::to_string(pid), root_)) {
        const std::uint64_t wanted = asked_[level.place] += bytes;
        if (found || bytes == 0 || wanted + kMargin <= level.room)
            continue;
        found = Finding{risk::kMemory,
                        "the driver stages " + mib(wanted) + " of GPU memory in host memory, and " +
                            level.name + " has room for " + mib(level.room) + " (" + mib(kMargin) +
                            " are to stay free): the kernel would kill the job; raise the limit or "
                            "free memory"};
    }
    return found;
}

std::vector<std::string> take_risks(pid_t pid, std::uint32_t api_version, std::size_t cuda_tasks,
                                    const ProcessGpus& gpus, bool stages, StagingRoom& room,
                                    const Config& config) {
    const std::string who = "pid " + std::to_string(pid);
    if (stages && gpus.source != GpuSource::nvml)
        host::info(who + ": how much GPU memory it uses is not known (" + gpus.why_not_all +
                   "): no check that host memory has room for it");
    std::vector<Finding> findings = find_risks(pid, api_version, cuda_tasks);
    if (const auto full = room.add(pid, stages ? gpus.memory_size() : 0))
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
