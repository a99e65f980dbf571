// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/driver_facts.hpp"

#include "core/error.hpp"
#include "cuda_plugin/nvml.hpp"
#include "device_memory/driver_abi.hpp"

#include <algorithm>
#include <functional>
#include <iterator>
#include <utility>

namespace gpustasis {
namespace {

std::string mib(std::uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

std::string version_name(std::uint32_t api_version) {
    return std::to_string(api_version / 1000) + "." + std::to_string(api_version % 1000 / 10);
}

[[noreturn]] void refuse(const std::string& why) {
    throw Error(Errc::unsupported, why);
}

[[noreturn]] void refuse_map(const GpuMapEntry& entry, const std::string& why) {
    throw Error(Errc::bad_argument, "gpu_map \"" + entry.from + "=" + entry.to + "\": " + why);
}

std::string name_of(const GpuInfo& gpu) {
    return gpu_uuid_text(gpu.uuid) + " (" + gpu.name + ")";
}

/// The place in `gpus` of the one that `text` names by its UUID or its number.
std::optional<std::size_t> find_named(const std::string& text, const std::vector<GpuInfo>& gpus) {
    if (!text.starts_with("GPU-")) {
        const std::size_t number = std::stoul(text);
        return number < gpus.size() ? std::optional(number) : std::nullopt;
    }
    const auto found = std::ranges::find(gpus, parse_gpu_uuid(text), &GpuInfo::uuid);
    if (found == gpus.end())
        return std::nullopt;
    return static_cast<std::size_t>(found - gpus.begin());
}

/// What the tasks of a checkpoint need of its GPUs.
struct Needs {
    std::vector<bool> seen;           ///< by place in the manifest: a task can see it
    std::vector<std::uint64_t> bytes; ///< in use there, as far as known
    std::uint64_t anywhere = 0;       ///< bytes of GPU memory of which it is not known where

    explicit Needs(const Manifest& manifest, const std::map<std::uint32_t, std::uint64_t>& staged)
        : seen(manifest.gpus.size(), false), bytes(manifest.gpus.size(), 0) {
        for (const ManifestTask& task : manifest.tasks) {
            if (task.kind != MemoryKind::gpu)
                continue;
            bool sizes_known = task.gpu_source == GpuSource::nvml;
            std::uint64_t placed = 0;
            if (task.gpu_source == GpuSource::unknown)
                seen.assign(seen.size(), true);
            for (const TaskGpu& gpu : task.gpus) {
                seen[gpu.gpu] = true;
                if (gpu.memory_size == TaskGpu::kUnknownSize)
                    sizes_known = false;
                else {
                    bytes[gpu.gpu] += gpu.memory_size;
                    placed += gpu.memory_size;
                }
            }
            if (const auto found = staged.find(task.pid); !sizes_known && found != staged.end())
                anywhere += found->second - std::min(placed, found->second);
        }
    }
};

/// Finds a GPU of this machine for each one that is needed.
class Placing {
public:
    Placing(const Manifest& manifest, const Needs& needs, const DriverFacts& here)
        : old_(manifest.gpus), needs_(needs), here_(*here.gpus), infos_(here.gpu_infos()),
          target_(old_.size()), taken_(here_.size(), false) {}

    void follow(const std::vector<GpuMapEntry>& map) {
        for (const GpuMapEntry& entry : map) {
            const auto from = find_named(entry.from, old_);
            const auto to = find_named(entry.to, infos_);
            if (!from)
                refuse_map(entry, "the checkpoint has no GPU " + entry.from);
            if (!needs_.seen[*from])
                refuse_map(entry, "no process of the checkpoint can see GPU " + entry.from);
            if (!to)
                refuse_map(entry, "this machine has no GPU " + entry.to);
            if (old_[*from].name != infos_[*to].name)
                refuse_map(entry, "a " + old_[*from].name + " cannot be replaced by a " +
                                      infos_[*to].name + ": the driver wants the same model");
            if (target_[*from])
                refuse_map(entry, "GPU " + entry.from + " is named twice");
            if (taken_[*to])
                refuse_map(entry, "another GPU goes to " + entry.to + " already");
            take(*from, *to);
        }
    }

    void keep_those_that_are_here() {
        for (std::size_t gpu = 0; gpu < old_.size(); ++gpu) {
            if (!needs_.seen[gpu] || target_[gpu])
                continue;
            const auto same = std::ranges::find(infos_, old_[gpu].uuid, &GpuInfo::uuid);
            if (same == infos_.end())
                continue;
            const auto to = static_cast<std::size_t>(same - infos_.begin());
            if (taken_[to])
                throw Error(Errc::bad_argument, "gpu_map: " + name_of(old_[gpu]) +
                                                    " is used by the checkpoint too, and another "
                                                    "GPU goes there; name a place for it as well");
            take(gpu, to);
        }
    }

    /// The largest need first, each to the GPU of its model with the most free memory.
    void find_places_for_the_rest() {
        std::vector<std::size_t> rest;
        for (std::size_t gpu = 0; gpu < old_.size(); ++gpu)
            if (needs_.seen[gpu] && !target_[gpu])
                rest.push_back(gpu);
        std::ranges::sort(rest, [&](std::size_t one, std::size_t other) {
            return needs_.bytes[one] != needs_.bytes[other]
                       ? needs_.bytes[one] > needs_.bytes[other]
                       : one < other;
        });
        const std::size_t none = here_.size();
        for (const std::size_t gpu : rest) {
            std::size_t best = none;
            for (std::size_t to = 0; to < here_.size(); ++to)
                if (!taken_[to] && infos_[to].name == old_[gpu].name &&
                    (best == none || free_of(to) > free_of(best)))
                    best = to;
            if (best == none)
                refuse("the checkpoint needs another GPU \"" + old_[gpu].name +
                       "\" than the ones this machine has left for it");
            take(gpu, best);
        }
    }

    /// What is lacking, in a sentence each.
    std::vector<std::string> lacking_memory() const {
        std::vector<std::string> lacking;
        std::uint64_t left = 0;
        bool left_is_known = true;
        for (std::size_t gpu = 0; gpu < old_.size(); ++gpu) {
            const std::optional<std::size_t> target = target_[gpu];
            if (!target)
                continue;
            const GpuStatus& to = here_[*target];
            const std::optional<std::uint64_t> free = to.free_size;
            left_is_known = left_is_known && free;
            if (!free)
                continue;
            if (needs_.bytes[gpu] > *free)
                lacking.push_back("the checkpoint holds " + mib(needs_.bytes[gpu]) +
                                  " of GPU memory for " + name_of(to.info) + ", which has " +
                                  mib(*free) +
                                  " free; end what uses it, or name another GPU in gpu_map");
            left += *free - std::min(*free, needs_.bytes[gpu]);
        }
        if (left_is_known && needs_.anywhere > left)
            lacking.push_back("the checkpoint holds " + mib(needs_.anywhere) +
                              " of GPU memory, this machine's GPUs have " + mib(left) +
                              " free for it");
        return lacking;
    }

    Placement result() const {
        Placement placement;
        for (std::size_t gpu = 0; gpu < old_.size(); ++gpu)
            if (const std::optional<std::size_t> target = target_[gpu])
                placement.moves.push_back({old_[gpu].uuid, infos_[*target].uuid});
        return placement;
    }

private:
    void take(std::size_t gpu, std::size_t to) {
        target_[gpu] = to;
        taken_[to] = true;
    }
    std::uint64_t free_of(std::size_t to) const { return here_[to].free_size.value_or(0); }

    const std::vector<GpuInfo>& old_;
    const Needs& needs_;
    const std::vector<GpuStatus>& here_;
    std::vector<GpuInfo> infos_;
    std::vector<std::optional<std::size_t>> target_;
    std::vector<bool> taken_;
};

} // namespace

std::vector<GpuInfo> DriverFacts::gpu_infos() const {
    std::vector<GpuInfo> infos;
    if (gpus)
        for (const GpuStatus& gpu : *gpus)
            infos.push_back(gpu.info);
    return infos;
}

DriverFacts read_driver_facts(Driver& driver) {
    return {driver.is_emulator(), driver.api_version(), driver.version_text(), driver.gpus()};
}

std::vector<TaskGpu> places_of(const ProcessGpus& seen, const std::vector<GpuInfo>& gpus) {
    std::vector<TaskGpu> places;
    for (const ProcessGpus::Gpu& gpu : seen.gpus) {
        const auto listed = std::ranges::find(gpus, gpu.uuid, &GpuInfo::uuid);
        if (listed == gpus.end())
            return {};
        places.push_back({static_cast<std::uint32_t>(listed - gpus.begin()), gpu.memory_size});
    }
    return places;
}

std::vector<GpuMove> Placement::moves_of(const Manifest& manifest, const ManifestTask& task) const {
    std::vector<GpuMove> found;
    for (const GpuMove& move : moves) {
        const auto sees = [&](const TaskGpu& gpu) {
            return manifest.gpus[gpu.gpu].uuid == move.from;
        };
        if (task.gpu_source == GpuSource::unknown || std::ranges::any_of(task.gpus, sees))
            found.push_back(move);
    }
    // Where nothing moves the driver is told nothing: it refuses a map under masked devices.
    const bool moved =
        std::ranges::any_of(found, [](const GpuMove& move) { return move.from != move.to; });
    return moved ? found : std::vector<GpuMove>{};
}

Placement place_gpus(const Manifest& manifest, const std::map<std::uint32_t, std::uint64_t>& staged,
                     const std::vector<GpuMapEntry>& map, const DriverFacts& here,
                     bool ignore_lacking) {
    std::vector<std::string> lacking;
    if (here.api_version < manifest.driver_api_version)
        lacking.push_back("the checkpoint was taken with a driver for CUDA " +
                          version_name(manifest.driver_api_version) + ", this machine's is for " +
                          version_name(here.api_version));
    if (!lacking.empty() && !ignore_lacking)
        refuse(lacking.front());
    if (!map.empty() && (!here.gpus || manifest.gpus.empty()))
        refuse(here.gpus ? "gpu_map: the checkpoint does not say which GPUs it needs"
                         : "gpu_map: without NVML it is not known which GPUs this machine has");
    if (!here.gpus || manifest.gpus.empty() || !manifest.has(MemoryKind::gpu))
        return {.moves = {}, .ignored = lacking};
    const Needs needs(manifest, staged);
    const auto seen = static_cast<std::size_t>(std::ranges::count(needs.seen, true));
    if (here.gpus->size() < seen)
        refuse("the processes of the checkpoint can see " + std::to_string(seen) +
               " GPU(s), this machine has " + std::to_string(here.gpus->size()) +
               ", and the driver wants a place for each");
    Placing placing(manifest, needs, here);
    placing.follow(map);
    placing.keep_those_that_are_here();
    placing.find_places_for_the_rest();
    std::ranges::move(placing.lacking_memory(), std::back_inserter(lacking));
    if (!lacking.empty() && !ignore_lacking)
        refuse(lacking.front());
    Placement placement = placing.result();
    placement.ignored = std::move(lacking);
    const bool moved = std::ranges::any_of(
        placement.moves, [](const GpuMove& move) { return move.from != move.to; });
    if (moved && here.api_version < driver::kGpuPairsApiVersion)
        refuse("the checkpoint's GPUs are not those it is to be restored on, and moving to others "
               "needs a driver for CUDA " +
               version_name(driver::kGpuPairsApiVersion) + " (580 or newer)");
    return placement;
}

} // namespace gpustasis
