// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/cpu_memory_dump.hpp"

#include "core/error.hpp"
#include "cuda_plugin/cpu_memory.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/shared_source.hpp"
#include "tracee/proc.hpp"
#include "tracee/thread_memory.hpp"

#include <fcntl.h>

#include <algorithm>
#include <cerrno>
#include <exception>
#include <iterator>
#include <ranges>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

// cpu_memory = "auto": not measured; below it, an image of its own and its syncs can save little.
constexpr std::uint64_t kWorthwhile = std::uint64_t{64} << 20;

} // namespace

void CpuMemoryDump::prepare() {
    if (config_.cpu_memory == CpuMemory::criu)
        return;
    try {
        if (!pages_)
            pages_.emplace();
        data_.emplace();
    } catch (const Error& e) {
        if (config_.cpu_memory == CpuMemory::ours)
            throw Error(e, std::string("cpu_memory = \"ours\": ") + e.what());
        host::warn(std::string("cpu_memory = \"auto\": CPU memory is left to CRIU: ") + e.what());
    }
}

// Their images would have one name, and a restore could not tell which process an image is of.
void CpuMemoryDump::refuse_same_inner_pid(std::uint32_t inner_pid) {
    if (std::ranges::count(inner_pids_ | std::views::values, inner_pid) > 1)
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

void CpuMemoryDump::add(pid_t pid, const std::vector<Region>& staging) {
    if (!data_ || taken_)
        return;
    if (!awaited_) {
        awaited_.emplace();
        for (const proc::Tracee& task : proc::tracees_below(pid)) {
            inner_pids_[task.pid] = task.inner_pid;
            if (task.state != 'Z') // CRIU asks for none of those
                awaited_->insert(task.pid);
        }
    }
    awaited_->erase(pid);
    added_.push_back({.pid = pid, .mappings = {}, .in_use = {}, .staging = staging});
}

bool CpuMemoryDump::take(const std::function<void()>& choose_parent, const Note& note) {
    if (!data_ || !pages_)
        return false;
    HiddenPages& pages = *pages_;
    HiddenData& data = *data_;
    taken_ = true;
    host::info("storing CPU memory: looking at " + std::to_string(added_.size()) + " processes");
    std::vector<SharingTask> tasks = look_at_tasks();
    look_at_flags(tasks);
    const std::vector<SharedPart> shared = find_shared(tasks);
    std::vector<Stored> all;
    for (std::size_t i = 0; i < tasks.size(); ++i) {
        std::vector<SharedPart> of_task;
        std::ranges::copy_if(shared, std::back_inserter(of_task),
                             [&](const SharedPart& part) { return part.pid == tasks[i].pid; });
        try {
            if (auto stored =
                    store(tasks[i], std::move(of_task), statistics_.cpu_memory[i], choose_parent))
                all.push_back(std::move(*stored));
        } catch (const Error& e) {
            throw Error(e, "CPU memory of pid " + std::to_string(tasks[i].pid) + ": " + e.what());
        }
    }
    if (!all.empty()) {
        Noted noted;
        for (const Stored& stored : all)
            noted.emplace_back(stored.entry, stored.pid);
        note(std::move(noted));
        for (const Stored& stored : all)
            hide(stored, pages, data);
    }
    files_.clear();
    return !all.empty();
}

// Their statistics get the same places.
std::vector<SharingTask> CpuMemoryDump::look_at_tasks() {
    std::vector<SharingTask> tasks = std::move(added_);
    added_.clear();
    for (SharingTask& task : tasks) {
        CpuMemoryStatistics& told = statistics_.cpu_memory.emplace_back();
        told.pid = task.pid;
        const auto inner_pid = inner_pids_.find(task.pid);
        told.image_pid =
            inner_pid == inner_pids_.end() ? proc::innermost_pid(task.pid) : inner_pid->second;
        told.phases.time("read_mappings", [&] { task.mappings = read_maps(task.pid); });
        told.phases.time("find", [&] { task.pages = find_own_pages(task.pid, task.mappings); });
        if (!task.pages.empty())
            told.left_because = why_written_by_device(task.pid, task.mappings);
    }
    return tasks;
}

// Flags and addresses in use can only leave less of the pages.
bool CpuMemoryDump::may_be_worthwhile(const SharingTask& task) const noexcept {
    std::uint64_t bytes = 0;
    for (const Region& run : task.pages)
        bytes += run.length;
    return bytes >= (config_.cpu_memory == CpuMemory::automatic ? kWorthwhile : 1);
}

// The kernel goes through all page tables of a task to tell them, and through the parent's for each child that
// shares them: only where something may be stored.
void CpuMemoryDump::look_at_flags(std::vector<SharingTask>& tasks) {
    const bool may_share = may_share_memory(tasks);
    for (std::size_t i = 0; i < tasks.size(); ++i) {
        SharingTask& task = tasks[i];
        CpuMemoryStatistics& told = statistics_.cpu_memory[i];
        if (told.left_because.empty() && (may_share || may_be_worthwhile(task))) {
            told.phases.time("read_mappings",
                             [&] { task.mappings = read_maps_with_flags(task.pid); });
            told.left_because = why_written_by_device(task.pid, task.mappings);
            if (told.left_because.empty())
                task.in_use = addresses_in_use(task.pid);
        }
        if (!told.left_because.empty())
            host::warn("the CPU memory of pid " + std::to_string(task.pid) +
                       " is left to CRIU, for a device may write to it: " + told.left_because);
    }
}

// A device that writes to memory of one task may write to what others share with it.
std::vector<SharedPart> CpuMemoryDump::find_shared(const std::vector<SharingTask>& tasks) {
    for (const CpuMemoryStatistics& told : statistics_.cpu_memory)
        if (!told.left_because.empty())
            return {};
    return statistics_.phases.time("find_shared_memory", [&] {
        files_ = open_shared_files(tasks, [](const std::string& why) {
            host::info("shared memory is left to CRIU: " + why);
        });
        return choose_shared_memory(tasks, files_);
    });
}

std::optional<CpuMemoryDump::Stored>
CpuMemoryDump::store(const SharingTask& task, std::vector<SharedPart> shared,
                     CpuMemoryStatistics& told, const std::function<void()>& choose_parent) {
    if (!told.left_because.empty())
        return std::nullopt;
    Stored stored{.entry = {}, .pid = task.pid, .own = {}, .shared = std::move(shared)};
    told.phases.time("find", [&] {
        stored.own = choose_cpu_memory(task.mappings, task.in_use, task.staging, among(task.pages));
    });
    std::vector<Region> regions = stored.own;
    for (const SharedPart& part : stored.shared) {
        regions.push_back(part.region);
        told.shared_bytes += part.region.length;
    }
    std::ranges::sort(regions, {}, &Region::address);
    for (const Region& region : regions)
        told.bytes += region.length;
    const bool little =
        regions.empty() || (config_.cpu_memory == CpuMemory::automatic && told.bytes < kWorthwhile);
    if (little)
        told.left_because = "there is little of it";
    if (little || !may_store(told, choose_parent)) {
        told.bytes = told.shared_bytes = 0;
        return std::nullopt;
    }
    images_.begin();
    stored.entry.pid = told.image_pid;
    stored.entry.kind = MemoryKind::cpu;
    told.regions = regions.size();
    SharedSource memory(task.pid, stored.shared, files_);
    const WriteResult written = told.phases.time(
        "write", [&] { return images_.write(task.pid, stored.entry, regions, memory); });
    told.totals = written.totals;
    told.file_bytes = written.file_size;
    told.damaged_in_parent = written.damaged_in_parent;
    host::info("stored " + std::to_string(told.bytes >> 20) + " MiB of CPU memory of pid " +
               std::to_string(task.pid) + " in " + std::to_string(told.regions) + " regions, " +
               std::to_string(told.shared_bytes >> 20) + " MiB of it shared, as " +
               std::to_string(told.file_bytes >> 20) + " MiB");
    return stored;
}

void CpuMemoryDump::hide(const Stored& stored, HiddenPages& pages, HiddenData& data) {
    if (!stored.own.empty())
        pages.hide(stored.pid, MemoryKind::cpu, stored.own);
    std::map<SharedFileId, std::vector<AddressRange>> ranges;
    for (const SharedPart& part : stored.shared)
        ranges[part.file].push_back({part.offset, part.offset + part.region.length});
    for (auto& [file, of_file] : ranges) {
        const int fd = ::fcntl(files_.at(file).fd.get(), F_DUPFD_CLOEXEC, 0);
        if (fd < 0)
            throw io_error("cannot hold shared memory", errno);
        data.hide(UniqueFd(fd), std::move(of_file));
    }
}

void CpuMemoryDump::finish(bool succeeded) noexcept {
    if (!data_ || !pages_)
        return;
    if (succeeded && awaited_ && !awaited_->empty())
        host::warn("criu did not ask this plugin about pid " + std::to_string(*awaited_->begin()) +
                   ": the CPU memory of all processes was left to CRIU");
    const auto tell_stored_twice = [](std::uint64_t bytes, const std::string& of) {
        if (bytes != 0)
            host::warn("criu did not ask this plugin about " + std::to_string(bytes >> 20) +
                       " MiB of " + of + ": its images hold them as well");
    };
    for (CpuMemoryStatistics& told : statistics_.cpu_memory) {
        const HiddenPages::Answered answered = pages_->answered(told.pid, MemoryKind::cpu);
        told.scans = answered.scans;
        if (succeeded && answered.hidden < answered.wanted)
            told.stored_twice = answered.wanted - answered.hidden;
        tell_stored_twice(told.stored_twice, "pid " + std::to_string(told.pid));
    }
    const HiddenData::Answered shared = data_->answered();
    if (succeeded)
        statistics_.shared_stored_twice = shared.wanted - shared.hidden;
    tell_stored_twice(statistics_.shared_stored_twice, "shared memory");
    data_.reset();
}

} // namespace gpustasis
