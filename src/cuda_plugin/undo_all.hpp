// SPDX-License-Identifier: Apache-2.0
/// What a worker does for the tasks when criu is gone.
#pragma once

#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver.hpp"
#include "cuda_plugin/long_calls.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"

#include <functional>

namespace gpustasis {

/// Wait until each unsettled task of `table` has died or is no longer traced, put its memory back out of `images`, have the
/// driver restore it, and unlock it; an account is left in gpustasis-undo.log. All are restored before any is unlocked, but
/// for those whose memory cannot be put back, or that do not come to where they can be restored: after 10 s nobody waits for
/// these. What fails is tried again: nobody waits for it after 10 s, but it has turns behind the others as long as there are
/// any, and is given up for good when it was tried three times at least, and once with nobody else left. Nor is one waited
/// for in which the driver hangs, for driver_timeout_ms; it is brought back when that ends.
/// `driver`: loads it, when first needed; from any thread. `calls`: also those that are under way still. The process must end
/// by _exit(): threads may be at work. Throws std::bad_alloc before anything was begun.
void undo_all(const std::function<Driver&()>& driver, const Config& config, TaskTable& table,
              const UndoImages& images, LongCalls& calls);

} // namespace gpustasis
