// SPDX-License-Identifier: Apache-2.0
/// The caller's side of custom storage: Checkpoint and Restore that hand out the target's memory, and
/// their end. target_storage.hpp has the other side.
#pragma once

#include "driver_emulator/channel.hpp"
#include "driver_emulator/driver/passing_fd.hpp"
#include "driver_emulator/driver_abi.hpp"

#include <cstdint>
#include <memory>
#include <sys/types.h>
#include <vector>

namespace gpustasis::emulator {

struct Stream;

/// One operation; its address is the handle.
struct StorageOperation {
    explicit StorageOperation(int table_file) : table(table_file) {}

    pid_t pid = 0;
    std::uint64_t id = 0;
    PassingFd table;                      ///< locked: says that we live
    StorageInfo info{};                   ///< what the program gets
    std::vector<StorageDevice> devices;   ///< info.devices
    std::vector<std::uint64_t> addresses; ///< of our mappings
};

/// Checkpoint or Restore of another process with custom storage. On success *out is the operation's
/// info, which lives until complete_storage_operation(). `request` has all but the contexts.
/// Returns a CUresult: not_initialized without cuInit, not_supported for this process itself,
/// invalid_context if a GPU of the target has no retained primary context here.
int begin_storage_operation(pid_t pid, ChannelRequest request, StorageInfo** out) noexcept;

/// Waits for the operation's streams, unmaps its memory, has the target go on, and frees its info; all
/// but the target also on failure. Returns invalid_value if there is no such operation,
/// stream_capture_unsupported if one of its streams captures.
int complete_storage_operation(const void* handle) noexcept;

} // namespace gpustasis::emulator
