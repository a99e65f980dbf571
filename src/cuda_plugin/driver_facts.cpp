#include "cuda_plugin/driver_facts.hpp"

#include "core/error.hpp"
#include "cuda_plugin/driver_abi.hpp"

#include <algorithm>

namespace gpustasis {
namespace {

std::string mib(std::uint64_t bytes) {
    return std::to_string(bytes >> 20) + " MiB";
}

std::string version_name(std::uint32_t api_version) {
    return std::to_string(api_version / 1000) + "." + std::to_string(api_version % 1000 / 10);
}

/// A GPU of this machine that `gpu` can be restored onto and that `taken` does not list.
const GpuStatus* find_match(const GpuInfo& gpu, const std::vector<GpuStatus>& here,
                            const std::vector<Id>& taken) {
    const auto is_free = [&](const GpuStatus& candidate) {
        return std::ranges::find(taken, candidate.info.uuid) == taken.end();
    };
    for (const GpuStatus& candidate : here)
        if (candidate.info.uuid == gpu.uuid)
            return &candidate;
    for (const GpuStatus& candidate : here)
        if (candidate.info.name == gpu.name && is_free(candidate))
            return &candidate;
    return nullptr;
}

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

std::vector<GpuMove> require_restorable(const Manifest& manifest, std::uint64_t staged_bytes,
                                        const DriverFacts& here) {
    if (here.api_version < manifest.driver_api_version)
        throw Error(Errc::unsupported, "the checkpoint was taken with a driver for CUDA " +
                                           version_name(manifest.driver_api_version) +
                                           ", this machine's is for " +
                                           version_name(here.api_version));
    if (!here.gpus || manifest.gpus.empty())
        return {};
    if (here.gpus->size() < manifest.gpus.size())
        throw Error(Errc::unsupported,
                    "the checkpoint was taken with " + std::to_string(manifest.gpus.size()) +
                        " GPU(s), this machine has " + std::to_string(here.gpus->size()));

    std::vector<GpuMove> moves;
    // A GPU that is here itself must not be given away to another that is not.
    std::vector<Id> taken;
    taken.reserve(2 * manifest.gpus.size());
    for (const GpuInfo& gpu : manifest.gpus)
        taken.push_back(gpu.uuid);
    bool moved = false;
    std::uint64_t free_size = 0;
    for (const GpuInfo& gpu : manifest.gpus) {
        const GpuStatus* match = find_match(gpu, *here.gpus, taken);
        if (match == nullptr)
            throw Error(Errc::unsupported, "the checkpoint needs another GPU \"" + gpu.name +
                                               "\" than the ones this machine has left for it");
        taken.push_back(match->info.uuid);
        moves.push_back({gpu.uuid, match->info.uuid});
        moved = moved || match->info.uuid != gpu.uuid;
        free_size += match->free_size;
    }
    if (staged_bytes > free_size)
        throw Error(Errc::unsupported, "the checkpoint holds " + mib(staged_bytes) +
                                           " of GPU memory, this machine's GPUs have " +
                                           mib(free_size) + " free");
    if (!moved)
        return {}; // the identity needs no map, and masked devices make the driver refuse one
    if (here.api_version < driver::kGpuPairsApiVersion)
        throw Error(Errc::unsupported,
                    "the checkpoint's GPUs are not this machine's, and moving to others needs a "
                    "driver for CUDA " +
                        version_name(driver::kGpuPairsApiVersion));
    return moves;
}

} // namespace gpustasis
