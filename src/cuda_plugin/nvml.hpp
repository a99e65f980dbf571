// SPDX-License-Identifier: Apache-2.0
/// The few NVML calls that say which GPUs there are without touching any of them.
/// Source: nvml.h of CUDA 12.8.
#pragma once

#include "cuda_plugin/driver.hpp"

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// Initialised NVML; shut down with the object. The library stays loaded.
class Nvml {
public:
    /// nullptr if `soname` cannot be loaded or finds no driver to talk to.
    static std::unique_ptr<Nvml> find(const std::string& soname);
    Nvml(const Nvml&) = delete;
    Nvml& operator=(const Nvml&) = delete;
    ~Nvml();

    /// "580.95.05"; empty if NVML does not say.
    std::string driver_version() const;

    /// In NVML's order (PCI bus). Throws Error: io naming the call that failed.
    std::vector<GpuStatus> gpus() const;

    /// The number of a GPU's device file (/dev/nvidia<minor>); nullopt: NVML cannot say. `index`: as
    /// in gpus().
    std::optional<unsigned> minor_number(unsigned index) const;

    /// How much memory of GPU `index` process `pid` of the initial pid namespace has in use, in bytes:
    /// 0 if it has no context there, TaskGpu::kUnknownSize if NVML lists it without a size. nullopt:
    /// NVML cannot say at all.
    std::optional<std::uint64_t> memory_of(unsigned index, int pid) const;

private:
    struct Api;
    explicit Nvml(std::unique_ptr<Api> api) noexcept;
    std::unique_ptr<Api> api_;
};

/// "GPU-01234567-89ab-cdef-0123-456789abcdef" as 16 bytes; other text (MIG-..., garbage): Error
/// bad_argument.
Id parse_gpu_uuid(const std::string& text);

/// The same the other way.
std::string gpu_uuid_text(const Id& id);

} // namespace gpustasis
