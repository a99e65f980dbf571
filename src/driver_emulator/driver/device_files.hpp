// SPDX-License-Identifier: Apache-2.0
/// The device files that a driver has open in a process, and what it maps of them. Plain functions
/// over plain state, which a restored process finds in memory.
#pragma once

#include "driver_emulator/driver_abi.hpp"
#include "driver_emulator/wire.hpp"

#include <cstddef>

namespace gpustasis::emulator {

/// Addresses at which a device file is mapped. A checkpoint leaves a PROT_NONE reservation there, so
/// that nothing else comes to lie where Restore maps it again.
struct DeviceWindow {
    void* address = nullptr;
    std::size_t size = 0;
    bool is_mapped = false;
};

/// Device files and their mappings: none of them can be dumped by CRIU, which is the point.
struct DeviceFiles {
    /// A descriptor that others know by its number: it has the same one after every Restore.
    struct Kept {
        int fd = -1;
        bool uvm = false;
    };
    static constexpr unsigned kMax = 64;
    int fds[kMax]; ///< those that Restore opens anew, at whatever number is free
    unsigned count = 0;
    static constexpr unsigned kMaxKept = 32;
    Kept kept[kMaxKept];
    unsigned kept_count = 0;
    DeviceWindow registers;
    static constexpr unsigned kMaxUvm = 2;
    DeviceWindow uvm[kMaxUvm]; ///< of the file that stands for /dev/nvidia-uvm
    char device[32] = {};      ///< what the files are: a path, or a kind of anonymous file
    char mapping_kind[32] =
        {}; ///< of `registers`: "device_path", "io_uring", "perf_event" or "none"
};

/// What cuInit opens: /dev/nvidiactl, /dev/nvidia-uvm twice, /dev/nvidia0 four times. `path` is the
/// device to use, "" to choose. Returns operating_system if there is nothing to open.
[[nodiscard]] Result open_init_devices(DeviceFiles& files, const char* path, bool cloexec) noexcept;

/// What a context opens, in two halves of eight: every second one is kept.
[[nodiscard]] Result open_context_devices(DeviceFiles& files, const char* path,
                                          bool cloexec) noexcept;

/// Maps `registers`, if this machine has something for it.
void map_registers(DeviceFiles& files) noexcept;

/// What tells from outside which GPUs a process can see, and whether it holds managed memory: opens
/// the files that stand for device files of `info`'s GPUs, and maps that of /dev/nvidia-uvm `uvm_count`
/// times in all. `directory` is device_directory(); what is not there is left out.
void open_named_devices(DeviceFiles& files, const DaemonInfo& info, const char* directory,
                        unsigned uvm_count) noexcept;

/// As a Checkpoint does. `placeholder` takes the numbers of kept descriptors: it is copied to each
/// of them, without close-on-exec. If it is none (-1) they are closed, and stay so.
void release_devices(DeviceFiles& files, int placeholder) noexcept;

/// As a Restore does: all again, but of the four /dev/nvidia0 of cuInit only two. Descriptors that a
/// context keeps come back by dup2, without close-on-exec.
[[nodiscard]] Result reopen_devices(DeviceFiles& files, const char* path, bool cloexec) noexcept;

/// Closes and unmaps everything.
void close_devices(DeviceFiles& files) noexcept;

} // namespace gpustasis::emulator
