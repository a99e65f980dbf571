// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/cpu_memory_dump.hpp"

#include "core/error.hpp"
#include "cuda_plugin/cpu_memory.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"

#include <exception>
#include <string>

namespace gpustasis {
namespace {

// cpu_memory = "auto": not measured; below it, an image of its own and its syncs can save little.
constexpr std::uint64_t kWorthwhile = std::uint64_t{64} << 20;

} // namespace

void CpuMemoryDump::prepare() {
    if (config_.cpu_memory == CpuMemory::criu)
        return;
    try {
        hidden_.emplace();
    } catch (const Error& e) {
        if (config_.cpu_memory == CpuMemory::ours)
            throw Error(e, std::string("cpu_memory = \"ours\": ") + e.what());
        host::warn(std::string("cpu_memory = \"auto\": CPU memory is left to CRIU: ") + e.what());
    }
}

// Their images would have one name, and a restore could not tell which process an image is of.
void CpuMemoryDump::refuse_same_inner_pid(std::uint32_t inner_pid) {
    if (tasks_with_pid_.empty())
        for (const pid_t task : proc::traced_by_us())
            ++tasks_with_pid_[proc::innermost_pid(task)];
    if (tasks_with_pid_[inner_pid] > 1)
        throw Error(Errc::unsupported, "two processes have pid " + std::to_string(inner_pid) +
                                           " in their pid namespaces, and an image of CPU memory "
                                           "could be either's: checkpoint them in separate dumps, "
                                           "or with cpu_memory = \"criu\"");
}

// Nothing has been done yet that "auto" could not leave be.
bool CpuMemoryDump::may_store(CpuMemoryStatistics& told,
                              const std::function<void()>& choose_parent) {
    try {
        refuse_same_inner_pid(told.image_pid);
        choose_parent();
        return true;
    } catch (const Error& e) {
        if (config_.cpu_memory == CpuMemory::ours)
            throw;
        told.left_because = e.what();
        host::warn("cpu_memory = \"auto\": the CPU memory of pid " + std::to_string(told.pid) +
                   " is left to CRIU: " + e.what());
        return false;
    }
}

std::optional<ManifestTask> CpuMemoryDump::take(pid_t pid, const std::vector<Region>& staging,
                                                const std::function<void()>& choose_parent) {
    if (!hidden_)
        return std::nullopt;
    CpuMemoryStatistics& told = statistics_.cpu_memory.emplace_back();
    told.pid = pid;
    told.image_pid = proc::innermost_pid(pid);
    const std::string name = "pid " + std::to_string(pid);
    const std::vector<Mapping> mappings =
        told.phases.time("read_mappings", [&] { return read_maps_with_flags(pid); });
    told.left_because = why_written_by_device(pid, mappings);
    if (!told.left_because.empty()) {
        host::warn("the CPU memory of " + name +
                   " is left to CRIU, for a device may write to it: " + told.left_because);
        return std::nullopt;
    }
    std::vector<Region> regions =
        told.phases.time("find", [&] { return find_cpu_memory(pid, mappings, staging); });
    for (const Region& region : regions)
        told.bytes += region.length;
    if (regions.empty() ||
        (config_.cpu_memory == CpuMemory::automatic && told.bytes < kWorthwhile)) {
        told.left_because = "there is little of it";
        told.bytes = 0;
        return std::nullopt;
    }
    if (!may_store(told, choose_parent)) {
        told.bytes = 0;
        return std::nullopt;
    }
    images_.begin();
    ManifestTask task;
    task.pid = told.image_pid;
    task.kind = MemoryKind::cpu;
    told.regions = regions.size();
    const WriteResult written =
        told.phases.time("write", [&] { return images_.write(pid, task, regions); });
    told.totals = written.totals;
    told.file_bytes = written.file_size;
    told.damaged_in_parent = written.damaged_in_parent;
    hidden_->hide(pid, regions);
    host::info("stored " + std::to_string(told.bytes >> 20) + " MiB of CPU memory of " + name +
               " in " + std::to_string(told.regions) + " regions, as " +
               std::to_string(told.file_bytes >> 20) + " MiB");
    return task;
}

void CpuMemoryDump::finish(bool succeeded) noexcept {
    if (!hidden_)
        return;
    for (CpuMemoryStatistics& told : statistics_.cpu_memory) {
        const HiddenPages::Answered answered = hidden_->answered(told.pid);
        told.scans = answered.scans;
        if (succeeded && answered.hidden < answered.wanted)
            told.stored_twice = answered.wanted - answered.hidden;
        if (told.stored_twice != 0)
            host::warn("criu did not ask this plugin about " +
                       std::to_string(told.stored_twice >> 20) + " MiB of pid " +
                       std::to_string(told.pid) + ": its images hold them as well");
    }
    hidden_.reset();
}

} // namespace gpustasis
