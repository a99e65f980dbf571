// SPDX-License-Identifier: Apache-2.0
/// The driver's process-checkpoint calls, wherever they are made: in this process
/// (driver_library.hpp) or in the worker (worker.hpp).
#pragma once

#include "core/error.hpp"
#include "core/manifest.hpp"
#include "device_memory/driver_error.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// One GPU of this machine now.
struct GpuStatus {
    GpuInfo info;
    std::optional<std::uint64_t> free_size; ///< device memory not in use, bytes; nullopt: NVML
                                            ///< cannot say, as where GPU and CPU share memory
};

/// The GPUs of one process.
struct ProcessGpus {
    struct Gpu {
        Id uuid{};
        std::uint64_t memory_size = TaskGpu::kUnknownSize; ///< in use by the process, bytes
    };

    GpuSource source = GpuSource::unknown;
    std::vector<Gpu> gpus;   ///< that it can see, in NVML's order; empty if not known
    std::string why_not_all; ///< why the source is not the best one, in a clause

    /// In use on all of them, bytes; nullopt: of one it is not known.
    std::optional<std::uint64_t> known_size() const noexcept {
        for (const Gpu& gpu : gpus)
            if (gpu.memory_size == TaskGpu::kUnknownSize)
                return std::nullopt;
        return source == GpuSource::nvml ? std::optional(memory_size()) : std::nullopt;
    }
    /// In use on all of them, as far as it is known; bytes.
    std::uint64_t memory_size() const noexcept {
        std::uint64_t sum = 0;
        for (const Gpu& gpu : gpus)
            sum += gpu.memory_size == TaskGpu::kUnknownSize ? 0 : gpu.memory_size;
        return sum;
    }
};

struct TaskRecord;

/// One GPU's memory goes to another GPU.
struct GpuMove {
    Id from{};
    Id to{};
};

/// Methods throw DriverError if the driver refuses, Error if it cannot be reached at all.
/// `pid` is a task's id, or any of its threads', as this process sees it.
class Driver {
public:
    Driver() = default;
    Driver(const Driver&) = delete;
    Driver& operator=(const Driver&) = delete;
    virtual ~Driver() = default;

    /// Whether the GPUs are emulated: figures made with them say nothing of real ones.
    virtual bool is_emulator() = 0;
    /// cuDriverGetVersion: 1000 * major + 10 * minor.
    virtual std::uint32_t api_version() = 0;
    /// nvmlSystemGetDriverVersion; empty if this machine has no NVML.
    virtual std::string version_text() = 0;
    /// Every GPU that NVML lists; nullopt if this machine has no NVML.
    virtual std::optional<std::vector<GpuStatus>> gpus() = 0;
    /// Which GPUs `pid` can see, and how much of their memory it uses. Ask while its GPU work is
    /// where the program left it: a checkpointed process has none. Throws nothing of NVML's.
    virtual ProcessGpus gpus_of(int pid) = 0;
    /// cuInit in the process that makes the calls; restore() needs it.
    virtual void initialize() = 0;

    /// nullopt: `pid` has no CUDA state. Throws DriverError if it has ended.
    virtual std::optional<int> restore_thread(int pid) = 0;
    /// The restore thread must be running. Throws DriverError for a state in flight.
    virtual ProcessState state(int pid) = 0;
    virtual void lock(int pid, std::uint32_t timeout_ms) = 0;
    virtual void checkpoint(int pid) = 0;
    virtual void restore(int pid, const std::vector<GpuMove>& moves) = 0;
    virtual void unlock(int pid) = 0;

    /// Put memory back that the driver has handed over to the worker (DirectWork::restore()).
    virtual void restore_direct(const TaskRecord& record);
};

} // namespace gpustasis
