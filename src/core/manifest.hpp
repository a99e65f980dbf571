// SPDX-License-Identifier: Apache-2.0
/// The manifest: the one file of an image directory that says which images belong to it.
#pragma once

#include "core/bytes.hpp"
#include "core/file.hpp"
#include "core/image_info.hpp"
#include "core/requirements.hpp"

#include <array>
#include <cstdint>
#include <ctime>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

inline constexpr const char* kManifestName = "gpustasis-manifest.img";

/// "gpustasis-<pid>.img"; of CPU memory "gpustasis-memory-<pid>.img".
std::string image_name(std::uint32_t pid, MemoryKind kind = MemoryKind::gpu);

/// How it was found out which GPUs a task has.
enum class GpuSource : std::uint8_t {
    unknown = 0,      ///< it was not: the task counts as one that may have every GPU
    device_files = 1, ///< from the device files that it has open; sizes are not known
    nvml = 2,         ///< the same, and NVML says how much memory of each it has in use
};

/// A GPU that a task can see.
struct TaskGpu {
    static constexpr std::uint64_t kUnknownSize = ~std::uint64_t{0};

    std::uint32_t gpu = 0;                    ///< its place in Manifest::gpus
    std::uint64_t memory_size = kUnknownSize; ///< that the task has in use there, bytes

    bool operator==(const TaskGpu&) const = default;
};

/// One CUDA task of the tree, or the CPU memory of one task with or without CUDA.
struct ManifestTask {
    std::uint32_t pid = 0;     ///< in the innermost pid namespace of the task
    bool externalized = false; ///< there is an image image_name(); always if of CPU memory
    Id digest{};               ///< ImageReader::digest of that image; all zero if not externalized
    ProcessState state_before = ProcessState::running;
    GpuSource gpu_source = GpuSource::unknown;
    std::vector<TaskGpu> gpus{}; ///< ascending by place; empty if, and only if, unknown
    MemoryKind kind = MemoryKind::gpu;

    /// The name of its image.
    std::string image_name() const { return gpustasis::image_name(pid, kind); }
    bool operator==(const ManifestTask&) const = default;
};

struct Manifest {
    Id checkpoint_id{};
    std::uint32_t driver_api_version = 0;
    std::string driver_version;
    std::vector<GpuInfo> gpus;       ///< of the machine of the dump, in the driver's order
    std::vector<ManifestTask> tasks; ///< ascending by pid, then kind, each pair once
    Id parent_id{};                  ///< checkpoint_id of the parent; all zero: none
    std::uint32_t chain_length = 0;  ///< checkpoints this one is built on, 1..65535; 0: none
    std::optional<Requirements> requirements{}; ///< nullopt: they were not recorded
    std::optional<Id>
        pack{}; ///< digest of the pack that holds CRIU's images; nullopt: there is none

    /// The one of this pid and kind; nullptr: there is none.
    const ManifestTask* find(std::uint32_t pid, MemoryKind kind) const noexcept;
    bool has(MemoryKind kind) const noexcept;
    /// Keeps the order.
    void add(ManifestTask task);
    bool operator==(const Manifest&) const = default;
};

/// When a file was last read and written: as of futimens().
using FileTimes = std::array<timespec, 2>;

/// The manifest of directory `dir_fd` before it has its name: what lacks one is no checkpoint. Destroyed without
/// commit(), it is gone. The caller keeps `dir_fd` open.
class ManifestFile {
public:
    /// All of it is on the medium on return. `times`: in place of now, of a copy of an older one. Throws Error: io,
    /// bad_argument.
    ManifestFile(int dir_fd, const Manifest& manifest,
                 const std::optional<FileTimes>& times = std::nullopt);
    /// It takes the place of an older one in a single durable step. Throws Error: io.
    void commit();

private:
    std::optional<PartFile> file_;
};

/// Both at once. Throws as those.
void write_manifest(int dir_fd, const Manifest& manifest,
                    const std::optional<FileTimes>& times = std::nullopt);

/// Throws Error: io (also if there is none), corrupt_data, unsupported.
Manifest read_manifest(int dir_fd);

/// The bytes of its file. Throws Error: bad_argument.
std::vector<std::byte> pack_manifest(const Manifest& manifest);

/// A file of more bytes is none.
std::uint64_t max_manifest_size() noexcept;

/// The manifest that is in `bytes`; `name` is for messages. Throws Error: corrupt_data, unsupported.
Manifest parse_manifest(Bytes bytes, const std::string& name);

} // namespace gpustasis
