// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/cpu_memory_restore.hpp"

#include "core/error.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"
#include "dropped_memory/refill.hpp"

#include <set>
#include <string>

namespace gpustasis {

void fill_cpu_memory(const RestoreImages::ByPid& images, const std::vector<pid_t>& tree,
                     unsigned threads, Statistics& statistics) {
    std::set<std::uint32_t> filled;
    for (const pid_t task : tree) {
        const std::uint32_t pid = proc::innermost_pid(task);
        const auto image = images.find(pid);
        if (image == images.end())
            continue;
        const std::string name = image_name(pid, MemoryKind::cpu);
        if (!filled.insert(pid).second)
            throw Error(Errc::corrupt_data,
                        "criu made two processes with pid " + std::to_string(pid) +
                            " in their pid namespaces, and " + name + " is of one");
        CpuMemoryStatistics& told = statistics.cpu_memory.emplace_back();
        told.pid = task;
        told.image_pid = pid;
        told.totals = image->second.totals();
        told.file_bytes = image->second.file_size();
        told.regions = image->second.info().regions.size();
        for (const Region& region : image->second.info().regions) {
            told.bytes += region.length;
            if (region.kind == RegionKind::shared_anonymous)
                told.shared_bytes += region.length;
        }
        try {
            told.phases.time("refill", [&] { refill(task, image->second, threads); });
        } catch (const Error& e) {
            throw Error(e, name + ": pid " + std::to_string(task) + ": " + e.what());
        }
        host::info("filled " + std::to_string(told.bytes >> 20) + " MiB of CPU memory of pid " +
                   std::to_string(task));
    }
    for (const auto& [pid, image] : images)
        if (!filled.contains(pid))
            throw Error(Errc::corrupt_data, image_name(pid, MemoryKind::cpu) +
                                                " is of a process that criu has not made");
}

} // namespace gpustasis
