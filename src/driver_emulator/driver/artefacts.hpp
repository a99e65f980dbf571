// SPDX-License-Identifier: Apache-2.0
/// What a driver leaves in a process that uses it, as seen in /proc: descriptors, a listening
/// socket, mappings; device_files.hpp has more. Plain functions over plain state, which a restored
/// process finds in memory.
#pragma once

#include "driver_emulator/channel.hpp"
#include "driver_emulator/driver_abi.hpp"

namespace gpustasis::emulator {

/// What the restore thread listens to. Kept for the process's life, checkpoints included.
struct Channel {
    int event = -1;            ///< eventfd
    int later_event = -1;      ///< eventfd: there since the first Checkpoint
    int request[2] = {-1, -1}; ///< pipe: read end, write end
    int reply[2] = {-1, -1};   ///< pipe: read end, write end
    int listener = -1;         ///< abstract socket "cuda-uvmfd-<pid namespace>-<pid>"

    [[nodiscard]] ChannelEnds ends() const noexcept { return {request[1], reply[0]}; }
};

/// Opens all of it but later_event and the listener. Returns operating_system if descriptors are
/// scarce; then and later close_channel() closes what is open.
[[nodiscard]] Result open_channel(Channel& channel, bool cloexec) noexcept;

/// Returns operating_system if the address of the socket is taken.
[[nodiscard]] Result open_listener(Channel& channel, bool cloexec) noexcept;

[[nodiscard]] Result open_later_event(Channel& channel, bool cloexec) noexcept;
void close_channel(Channel& channel) noexcept;

/// What "cuda-EvtHandlr" listens to. Kept as the channel is.
struct EventFiles {
    int events[2] = {-1, -1}; ///< eventfds
    int pipe[2] = {-1, -1};   ///< read end, write end
};

/// Each opens nothing that is open. Returns operating_system if descriptors are scarce.
[[nodiscard]] Result open_event(EventFiles& files, unsigned index, bool cloexec) noexcept;
[[nodiscard]] Result open_event_pipe(EventFiles& files, bool cloexec) noexcept;

/// The reservations of a fresh driver: 8 GiB at 0x200000000 (if it is free) and smaller windows.
void reserve_addresses() noexcept;

/// The host memory that a driver keeps for itself from the first context on: 2 MiB of shared anonymous
/// memory ("/dev/zero (deleted)"), which stays during a checkpoint.
[[nodiscard]] Result map_system_memory() noexcept;

} // namespace gpustasis::emulator
