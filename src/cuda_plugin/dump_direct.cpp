// SPDX-License-Identifier: Apache-2.0
/// What of DumpSession is of GPU memory that the driver hands over to the worker (direct_work.hpp).
#include "core/error.hpp"
#include "cuda_plugin/dump_session.hpp"
#include "cuda_plugin/host.hpp"
#include "device_memory/device_copy.hpp"

#include <algorithm>
#include <chrono>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

// Bytes of an image of all that a process has on its GPUs, if nothing of it compresses.
std::uint64_t most_of_image(const ProcessGpus& seen, const std::vector<GpuInfo>& gpus) {
    std::uint64_t most = 0;
    for (const ProcessGpus::Gpu& gpu : seen.gpus) {
        const auto listed = std::ranges::find(gpus, gpu.uuid, &GpuInfo::uuid);
        if (gpu.memory_size != TaskGpu::kUnknownSize)
            most += with_margin(gpu.memory_size);
        else if (listed != gpus.end())
            most += listed->memory_size;
    }
    constexpr std::uint64_t kAllElse =
        1U << 20;                         // header, metadata, and what is reserved in whole blocks
    return most + most / 1024 + kAllElse; // the index has 40 bytes for a chunk of 4 KiB at least
}

} // namespace

// Whether the driver is to hand the GPU memory of the task over, and all that this needs beforehand: once it has, there
// is no way back.
void DumpSession::prepare_direct(TaskRecord& record, TaskStatistics& statistics) {
    if (config_.gpu_memory == GpuMemory::staged)
        return;
    std::string why_not;
    std::vector<Id> gpus;
    gpus.reserve(statistics.gpus.gpus.size());
    std::size_t used = 0; // those of which it is not known count as used
    for (const ProcessGpus::Gpu& gpu : statistics.gpus.gpus) {
        const bool is_used = gpu.memory_size != 0;
        gpus.insert(is_used ? gpus.begin() : gpus.end(), gpu.uuid);
        used += is_used ? 1 : 0;
    }
    if (used == 0) // a process of CUDA that NVML lists nowhere may hold memory anywhere
        used = gpus.size();
    const std::uint32_t api = images_.manifest().driver_api_version;
    if (!config_.externalize)
        why_not = "externalize is off";
    else if (api < driver::kCustomStorageApiVersion)
        why_not = "the driver is of CUDA " + std::to_string(api / 1000) + "." +
                  std::to_string(api % 1000 / 10) + ", and 13.4 or later is needed";
    else if (gpus.empty())
        why_not = "which GPUs the process uses is not known: " + statistics.gpus.why_not_all;
    if (why_not.empty()) {
        try {
            worker_.prepare_direct(record, gpus, used);
            record.direct.wanted = true;
            record.direct.most = most_of_image(statistics.gpus, images_.manifest().gpus);
            return;
        } catch (const Error& e) {
            why_not = e.what();
        }
    }
    if (config_.gpu_memory == GpuMemory::direct)
        throw Error(Errc::unsupported, "gpu_memory = \"direct\": " + why_not);
    statistics.staged_because = why_not;
    host::info("pid " + std::to_string(record.pid) + ": its GPU memory is staged: " + why_not);
}

// What of the time of a call was the driver's; while the worker stores what the driver has handed over, others wait.
void DumpSession::add_times(const TaskRecord& record, std::chrono::steady_clock::duration waited) {
    Phases& phases = statistics_of(record).phases;
    const auto of_driver = std::min(waited, std::chrono::steady_clock::duration(
                                                std::chrono::nanoseconds(record.direct.driver_ns)));
    phases.add("driver_checkpoint", record.direct.begun ? of_driver : waited);
    if (record.direct.begun)
        phases.add("write", waited - of_driver);
}

// The worker has stored it, durable, and there is nothing of it in the task.
void DumpSession::take_direct(TaskRecord& record, TaskStatistics& statistics) {
    const DirectRecord& direct = record.direct;
    ManifestTask task = entry_of(record);
    images_.take(record, task);
    if (!direct.room_was_reserved)
        host::warn("pid " + std::to_string(record.pid) +
                   ": the file system reserves no room for images: had it become full meanwhile, "
                   "the GPU memory would have been kept in host memory");
    statistics.gpu_memory = "direct";
    statistics.externalized = true;
    const std::vector<Region> regions = regions_of(direct.device_sizes());
    statistics.regions = regions.size();
    statistics.totals = direct.totals;
    statistics.file_bytes = direct.file_size;
    statistics.damaged_in_parent = direct.damaged_in_parent;
    for (const Region& region : regions)
        statistics.staged_bytes += region.length;
    note({{std::move(task), record.pid}});
}

} // namespace gpustasis
