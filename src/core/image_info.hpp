// SPDX-License-Identifier: Apache-2.0
/// What an image says about its task, apart from the chunks themselves.
/// Every field has its home in docs/format.md.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// 128 bits that name a checkpoint, a GPU, a boot or a digest.
using Id = std::array<std::byte, 16>;

/// Which memory of a task an image holds.
enum class MemoryKind : std::uint8_t {
    gpu = 0,   ///< what the driver staged: gone from the task, or hidden, once it is stored
    cpu = 1,   ///< the task's own, which a dump leaves as it is
    files = 2, ///< none: files of a checkpoint (file_pack.hpp)
};

/// How a region is mapped in the task; decides how its pages are dropped. Of CPU memory, a memfd and a file
/// that was removed from a tmpfs are shared anonymous memory too.
enum class RegionKind : std::uint8_t {
    private_anonymous = 0,
    shared_anonymous = 1,
    device =
        2, ///< not in the task at all: memory of one GPU, which the driver handed over itself (custom storage)
};

/// Addresses of RegionKind::device. What a task has on GPU `number` of ImageInfo::gpus, 256 at most, is cut into stripes
/// of this size, and each is a region. They ascend by stripe first, then by GPU: who reads or writes an image in order
/// keeps the links of all GPUs busy.
inline constexpr unsigned kStripeBits = 26;
inline constexpr unsigned kDeviceNumberBits = 8;
inline constexpr std::uint64_t kStripe = std::uint64_t{1} << kStripeBits;
constexpr std::uint64_t device_address(std::size_t number, std::uint64_t offset) noexcept {
    return offset >> kStripeBits << (kStripeBits + kDeviceNumberBits) |
           static_cast<std::uint64_t>(number) << kStripeBits | (offset & (kStripe - 1));
}
constexpr std::size_t device_number(std::uint64_t address) noexcept {
    return address >> kStripeBits & ((1U << kDeviceNumberBits) - 1);
}
constexpr std::uint64_t device_offset(std::uint64_t address) noexcept {
    return address >> (kStripeBits + kDeviceNumberBits) << kStripeBits | (address & (kStripe - 1));
}

/// One run of memory: [address, address + length) in the task, both page multiples.
struct Region {
    std::uint64_t address = 0;
    std::uint64_t length = 0;
    std::uint32_t protection = 0; ///< PROT_READ | PROT_WRITE | PROT_EXEC as mapped
    RegionKind kind = RegionKind::private_anonymous;

    bool operator==(const Region&) const = default;
};

/// One GPU of the machine the checkpoint was taken on, in the order the driver lists them.
struct GpuInfo {
    Id uuid{};
    std::string name;              ///< e.g. "NVIDIA H200"; at most 255 bytes
    std::uint64_t memory_size = 0; ///< total device memory in bytes

    bool operator==(const GpuInfo&) const = default;
};

/// The driver's view of a process; values of CUprocessState (cuda.h).
enum class ProcessState : std::uint32_t { running = 0, locked = 1, checkpointed = 2, failed = 3 };

/// Another image that holds chunks of one: of an earlier checkpoint, or of another task, or other kind
/// of memory, of the same.
struct Source {
    Id checkpoint_id{};
    Id digest{};                 ///< of that file
    std::uint64_t file_size = 0; ///< of that file, in bytes
    std::uint32_t pid = 0;       ///< the file is image_name(pid, kind)
    std::uint32_t depth = 0;     ///< parent links to its directory; 0: the own, 1: the parent's
    MemoryKind kind = MemoryKind::gpu;

    bool operator==(const Source&) const = default;
};

struct ImageInfo {
    Id checkpoint_id{};    ///< random; the same in every image of one dump
    Id parent_id{};        ///< checkpoint_id of the parent; all zero: none
    std::uint32_t pid = 0; ///< in the innermost pid namespace of the task
    MemoryKind kind = MemoryKind::gpu;
    std::uint64_t start_time = 0; ///< field 22 of /proc/PID/stat, in clock ticks since boot
    Id boot_id{};                 ///< /proc/sys/kernel/random/boot_id
    std::string comm;             ///< of the task's main thread; at most 15 bytes
    ProcessState state_before = ProcessState::running; ///< as found before the dump
    std::uint32_t driver_api_version = 0; ///< cuDriverGetVersion: 1000 * major + 10 * minor
    std::string driver_version;           ///< as NVML says it, "580.95.05"; empty: not known
    std::vector<GpuInfo> gpus;            ///< empty: not known
    std::uint32_t chunk_size = 0;         ///< bytes; a power of two, kMinChunkSize..kMaxChunkSize
    std::vector<Region> regions;          ///< ascending by address, not overlapping
    std::vector<Source> sources;          ///< ascending by depth, then pid, then kind
    /// The driver handed the memory over itself, and takes it back the same way alone, also where there is none of it:
    /// then all regions are RegionKind::device, else none is.
    bool of_devices = false;

    bool operator==(const ImageInfo&) const = default;
};

} // namespace gpustasis
