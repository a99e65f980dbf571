// SPDX-License-Identifier: Apache-2.0
/// The target's side of custom storage: Checkpoint and Restore whose caller moves the memory itself.
/// See checkpoint.hpp for what may be used here, storage_table.hpp for how the caller gets at it.
#pragma once

#include "driver_emulator/channel.hpp"

namespace gpustasis::emulator {

struct Driver;

/// LOCKED to CHECKPOINTING: lays the memory open. On failure everything is as before.
/// Returns invalid_context if the caller lacks a context on a GPU that the process uses.
Result begin_storage_checkpoint(Driver& driver, const ChannelRequest& request,
                                const OperationPlan& plan) noexcept;

/// CHECKPOINTED to RESTORING: takes GPUs, as unstage_device_memory() does, and lays their memory
/// open, filled with a pattern. `poisoned` as there.
Result begin_storage_restore(Driver& driver, const ChannelRequest& request,
                             const OperationPlan& plan, bool& poisoned) noexcept;

/// CHECKPOINTING to CHECKPOINTED, which gives the GPUs up, or RESTORING to LOCKED; with
/// request.undo to LOCKED, for the GPUs have everything still, and to FAILED. Returns illegal_state if
/// there is no such operation.
Result complete_storage(Driver& driver, const ChannelRequest& request) noexcept;

/// Ends an operation whose caller is gone: a checkpoint counts as complete, after a restore the
/// process is FAILED.
void end_abandoned_storage(Driver& driver) noexcept;

} // namespace gpustasis::emulator
