// SPDX-License-Identifier: Apache-2.0
/// The driver and the GPUs of this machine, as an image records them and a restore compares them.
#pragma once

#include "core/manifest.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver.hpp"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

struct DriverFacts {
    bool is_emulator = false;
    std::uint32_t api_version = 0;
    std::string version;                        ///< empty: no NVML
    std::optional<std::vector<GpuStatus>> gpus; ///< nullopt: no NVML

    /// Without what is in use now.
    std::vector<GpuInfo> gpu_infos() const;
    /// "emulator" or "driver"
    const char* backend() const noexcept { return is_emulator ? "emulator" : "driver"; }
};

/// Throws Error, DriverError: there is no usable driver.
DriverFacts read_driver_facts(Driver& driver);

/// What a manifest that lists `gpus` records of a process that sees `seen`; nothing if one of these is
/// not listed: a part would be worse than none.
std::vector<TaskGpu> places_of(const ProcessGpus& seen, const std::vector<GpuInfo>& gpus);

/// Where the GPUs of a checkpoint's tasks go on this machine.
struct Placement {
    std::vector<GpuMove> moves;       ///< of each GPU that a task can see; empty: not known
    std::vector<std::string> ignored; ///< what is lacking and was not to stop it, in sentences

    /// What Restore of `task` has to be told: nothing if each GPU stays where it was, else every GPU
    /// that the task can see and no other, as the driver demands.
    std::vector<GpuMove> moves_of(const Manifest& manifest, const ManifestTask& task) const;
};

/// Check that what `manifest` records can be restored here: a driver not older; for every GPU that a
/// task can see the one that `map` names, or itself, or another of the same model; and on each as much
/// free memory as the tasks had in use. `staged` has the bytes of GPU memory by task, for those of
/// which nothing better is known. What NVML does not say is not checked. `ignore_lacking`: an older driver
/// and too little memory are no reason to refuse.
/// Throws Error: unsupported naming what is missing, bad_argument for a `map` that cannot hold.
Placement place_gpus(const Manifest& manifest, const std::map<std::uint32_t, std::uint64_t>& staged,
                     const std::vector<GpuMapEntry>& map, const DriverFacts& here,
                     bool ignore_lacking = false);

} // namespace gpustasis
