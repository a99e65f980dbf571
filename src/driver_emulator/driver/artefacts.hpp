// SPDX-License-Identifier: Apache-2.0
/// What a driver leaves in a process that uses it, as seen in /proc: descriptors, a listening
/// socket, mappings. Plain functions over plain state, which a restored process finds in memory.
#pragma once

#include "driver_emulator/channel.hpp"
#include "driver_emulator/driver_abi.hpp"
#include "driver_emulator/wire.hpp"

#include <cstddef>

namespace gpustasis::emulator {

/// What the restore thread listens to. Kept for the process's life, checkpoints included.
struct Channel {
    int events[2] = {-1, -1};  ///< eventfds
    int request[2] = {-1, -1}; ///< pipe: read end, write end
    int reply[2] = {-1, -1};   ///< pipe: read end, write end
    int listener = -1;         ///< abstract socket "cuda-uvmfd-<pid namespace>-<pid>"

    [[nodiscard]] ChannelEnds ends() const noexcept { return {request[1], reply[0]}; }
};

/// Opens all of it. Returns operating_system, with nothing left open, if the address of the socket
/// is taken or descriptors are scarce.
[[nodiscard]] Result open_channel(Channel& channel, bool cloexec) noexcept;
void close_channel(Channel& channel) noexcept;

/// Device files and their mappings: none of them can be dumped by CRIU, which is the point.
struct DeviceFiles {
    static constexpr unsigned kMax = 64;
    int fds[kMax];
    unsigned count = 0;
    void* mapping = nullptr;
    std::size_t mapping_size = 0;
    char device[32] = {};       ///< what the files are: a path, or a kind of anonymous file
    char mapping_kind[32] = {}; ///< "device_path", "io_uring", "perf_event" or "none"
    static constexpr unsigned kMaxUvm = 2;
    void* uvm[kMaxUvm] = {}; ///< mappings of the file that stands for /dev/nvidia-uvm
};

/// What tells from outside which GPUs a process can see, and whether it holds managed memory: opens
/// the files that stand for device files of `info`'s GPUs, and maps that of /dev/nvidia-uvm `uvm_count`
/// times in all. `directory` is device_directory(); what is not there is left out.
void open_named_devices(DeviceFiles& files, const DaemonInfo& info, const char* directory,
                        unsigned uvm_count) noexcept;

/// Opens `count` more of them, and makes the mapping if there is none. `path` is the device to use,
/// "" to choose. Returns operating_system if there is nothing to open.
[[nodiscard]] Result open_devices(DeviceFiles& files, unsigned count, const char* path,
                                  bool cloexec) noexcept;
void close_devices(DeviceFiles& files) noexcept;

/// The reservations of a fresh driver: 8 GiB at 0x200000000 (if it is free) and smaller windows.
void reserve_addresses() noexcept;

/// The host memory that a driver keeps for itself from the first context on: 2 MiB of shared anonymous
/// memory ("/dev/zero (deleted)"), which stays during a checkpoint.
[[nodiscard]] Result map_system_memory() noexcept;

} // namespace gpustasis::emulator
