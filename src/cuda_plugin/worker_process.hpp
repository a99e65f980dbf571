// SPDX-License-Identifier: Apache-2.0
/// The worker's side of worker.hpp.
#pragma once

#include "cuda_plugin/config.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"

namespace gpustasis {

class DirectStore;

/// In the image directory: what the worker did when criu was gone.
inline constexpr const char* kUndoLogName = "gpustasis-undo.log";

/// Send this process's pid on `socket`, then serve requests on it until it is told to quit, or until the other end is gone: then wait
/// until each unsettled task of `table` has died or is no longer traced, and undo or kill as the
/// table says, leaving an account in the file gpustasis-undo.log
/// of the checkpoint's directory. `images` are what an undo reads from, and `key` is for them; `store` is none in a
/// restore. Never returns.
[[noreturn]] void run_worker(const Config& config, TaskTable& table, UndoImages& images,
                             KeyHandover& key, DirectStore* store, int socket);

} // namespace gpustasis
