// SPDX-License-Identifier: Apache-2.0
/// What a dump or a restore did and how long it took, as a JSON file beside the images.
/// Its keys are documented in docs/operating.md.
#pragma once

#include "core/image_info.hpp"
#include "core/image_writer.hpp"
#include "cuda_plugin/driver.hpp"

#include <chrono>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

/// Named durations in the order they were first taken; the same name adds up.
class Phases {
public:
    /// Without memory for it the time is lost: no dump fails for want of a figure.
    void add(const std::string& name, std::chrono::steady_clock::duration time) noexcept;

    /// Run `body` and add the time it took, also if it throws.
    template <class Body>
    decltype(auto) time(const std::string& name, Body&& body) {
        struct Stop {
            Phases& phases;
            const std::string& name;
            std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
            ~Stop() { phases.add(name, std::chrono::steady_clock::now() - begin); }
        } const stop{*this, name};
        return std::forward<Body>(body)();
    }

    const std::vector<std::pair<std::string, double>>& milliseconds() const noexcept {
        return times_;
    }

private:
    std::vector<std::pair<std::string, double>> times_;
};

struct TaskStatistics {
    int pid = 0;                 ///< as criu sees it
    std::uint32_t image_pid = 0; ///< in the task's innermost pid namespace
    bool externalized = false;
    ProcessState state_before = ProcessState::running;
    std::uint64_t regions = 0;
    std::uint64_t staged_bytes = 0;
    EncodingTotals totals;
    std::uint64_t file_bytes = 0;
    std::uint64_t damaged_in_parent = 0; ///< chunks stored anew for that reason
    std::string gpu_memory;              ///< "staged" or "direct"; empty: none was moved
    std::string staged_because;          ///< why gpu_memory = "auto" is not direct
    std::string
        staging; ///< of a dump: "kept" or "dropped", so that CRIU does not dump it; empty: neither
    std::uint64_t stored_twice =
        0; ///< of a dump: bytes that were kept, and that CRIU dumped as well
    std::string not_guarded_because; ///< of a dump: why its dropped memory stands behind nothing
    bool huge_pages = false;         ///< of a restore: they were asked for
    ProcessGpus gpus;                ///< of a dump: those of the task
    Phases phases;
};

/// The CPU memory of one task.
struct CpuMemoryStatistics {
    int pid = 0;                 ///< as criu sees it
    std::uint32_t image_pid = 0; ///< in the task's innermost pid namespace
    std::string left_because;    ///< why none of it was stored; empty: its image holds it
    std::uint64_t regions = 0;
    std::uint64_t bytes = 0;
    std::uint64_t shared_bytes = 0; ///< of these, those that tasks share: in the image of one
    EncodingTotals totals;
    std::uint64_t file_bytes = 0;
    std::uint64_t damaged_in_parent = 0; ///< chunks stored anew for that reason
    std::uint64_t scans = 0;             ///< of a dump: criu's questions answered without it
    std::uint64_t stored_twice = 0; ///< of a dump: bytes that criu did not ask about, and dumped
    Phases phases;
};

struct Statistics {
    std::string stage;         ///< "dump" or "restore"
    std::string result = "ok"; ///< or "failed"
    std::string error;         ///< the first failure, in a sentence
    std::string backend; ///< "driver", or "emulator": figures made with it say nothing of GPUs
    std::uint32_t driver_api_version = 0;
    std::string driver_version;
    std::vector<GpuInfo> gpus;      ///< of this machine
    std::vector<GpuMove> gpu_moves; ///< of a restore: where memory went to another GPU
    std::size_t parallel_gpus =
        0; ///< tasks that the driver worked in at once, at most; 0: none uses CUDA
    std::string in_turn_because;    ///< why the driver was called for one task after the other
    std::vector<std::string> risks; ///< of a dump: findings that `risk` allowed, in a sentence
    std::string parent_directory;   ///< empty: a full checkpoint
    std::string parent_id;          ///< in hex
    std::uint32_t chain_length = 0; ///< checkpoints it is built on
    std::string full_because;       ///< of a dump that has no parent: why
    std::string not_kept_because;   ///< of a container's dump: why the next cannot build on it
    std::string
        arena_directory; ///< of a dump into memory: where its images are; empty: on the disk
    std::string config_source;
    unsigned threads = 0;
    std::vector<TaskStatistics> tasks;
    std::vector<CpuMemoryStatistics> cpu_memory; ///< by task; empty: all was left to CRIU
    std::uint64_t shared_stored_twice = 0;       ///< of a dump: bytes that criu did not ask about
    Phases phases;
};

/// Write to "gpustasis-<stage>.json" in `image_dir`, replacing an older one. Throws Error: io.
void write_statistics(int image_dir, const Statistics& statistics);

} // namespace gpustasis
