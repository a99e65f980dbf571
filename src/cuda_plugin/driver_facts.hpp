/// The driver and the GPUs of this machine, as an image records them and a restore compares them.
#pragma once

#include "core/manifest.hpp"
#include "cuda_plugin/driver.hpp"

#include <cstdint>
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

/// Check that what `manifest` records can be restored here: a driver not older, every GPU or
/// another of the same name, `staged_bytes` of free device memory. What NVML does not say is not
/// checked. Returns where each GPU's memory goes if any has to move, in which case every GPU is
/// listed as the driver demands, else nothing.
/// Throws Error: unsupported naming what is missing.
std::vector<GpuMove> require_restorable(const Manifest& manifest, std::uint64_t staged_bytes,
                                        const DriverFacts& here);

} // namespace gpustasis
