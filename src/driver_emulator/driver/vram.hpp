// SPDX-License-Identifier: Apache-2.0
/// One device's memory as its client sees it: addresses, allocations, and how to reach the bytes.
#pragma once

#include "driver_emulator/driver_abi.hpp"

#include <cstddef>
#include <cstdint>
#include <map>

namespace gpustasis::emulator {

class DaemonLink;

struct Context;

/// One allocation inside a segment.
struct Block {
    std::uint64_t size = 0;
    const Context* owner = nullptr; ///< it goes when its context goes
};

/// A run of VRAM that the daemon accounts for: a multiple of 2 MiB.
struct Segment {
    std::uint64_t size = 0;
    bool shared = false;                        ///< by small allocations
    std::map<std::uint64_t, Block> allocations; ///< by address, not overlapping
    void* staging = nullptr;                    ///< its bytes, while checkpointed
};

struct Allocation {
    DevicePtr address = 0;
    std::uint64_t size = 0;
    const Context* owner = nullptr;
};

/// The caller serialises calls. Those marked "stopped" allocate nothing: the restore thread uses
/// them.
class Vram {
public:
    using Segments = std::map<std::uint64_t, Segment>; ///< by address

    /// Reserves addresses here and in the worker for a GPU of `capacity` bytes.
    Result attach(DaemonLink& link, unsigned gpu, std::uint64_t capacity);

    /// Takes up the same addresses with a new worker. Stopped.
    Result reattach(DaemonLink& link, unsigned gpu) noexcept;

    /// Forgets the worker, keeps addresses and allocations. Stopped.
    void detach() noexcept;

    [[nodiscard]] bool is_attached() const noexcept { return memory_ >= 0; }

    Result allocate(DaemonLink& link, std::uint64_t size, const Context* owner, DevicePtr* address);
    Result free(DaemonLink& link, DevicePtr address);
    void free_all(DaemonLink& link, const Context* owner);

    /// The allocation that an address lies in; size 0 if none.
    [[nodiscard]] Allocation find(DevicePtr address) const noexcept;

    /// Gives the addresses up, and takes them again: out_of_memory if something else has come to
    /// lie there. Stopped.
    void release_addresses() noexcept;
    Result reserve_addresses() noexcept;

    /// Takes a segment's VRAM again after reattach(). Stopped.
    Result map_again(DaemonLink& link, std::uint64_t address, std::uint64_t size) noexcept;

    /// Whether addresses are reserved: from the first context on, checkpoints included.
    [[nodiscard]] bool owns_addresses() const noexcept { return window_size_ != 0; }

    /// Whether `size` bytes from `address` are one allocation's.
    [[nodiscard]] bool contains(DevicePtr address, std::uint64_t size) const noexcept;

    /// Whether an address is of this device, allocated or not.
    [[nodiscard]] bool owns(DevicePtr address) const noexcept {
        return address - base_ < window_size_;
    }

    // Bytes. The range must be allocated; safe from any thread, as VRAM itself. Stopped.
    Result read(DevicePtr address, void* to, std::size_t size) const noexcept;
    Result write(DevicePtr address, const void* from, std::size_t size) noexcept;

    /// Repeats `pattern` of `pattern_size` (1, 2 or 4) bytes over `size` bytes.
    Result fill(DevicePtr address, const void* pattern, std::size_t pattern_size,
                std::uint64_t size) noexcept;

    [[nodiscard]] Segments& segments() noexcept { return segments_; }
    [[nodiscard]] unsigned gpu() const noexcept { return gpu_; }

    /// The worker's file, and where an address of ours lies in it.
    [[nodiscard]] int memory() const noexcept { return memory_; }
    [[nodiscard]] std::uint64_t offset_of(DevicePtr address) const noexcept {
        return address - base_;
    }

private:
    [[nodiscard]] std::uint64_t find_gap(std::uint64_t size) const noexcept;
    Result add_segment(DaemonLink& link, std::uint64_t size, bool shared, Segment** segment,
                       std::uint64_t* address);
    Result allocate_small(DaemonLink& link, Block block, DevicePtr* address);

    unsigned gpu_ = 0;
    int memory_ = -1; ///< the worker's file: offset = address - base_
    std::uint64_t base_ = 0;
    std::uint64_t window_size_ = 0;
    Segments segments_;
};

} // namespace gpustasis::emulator
