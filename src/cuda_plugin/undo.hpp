/// Bring a task back to where the dump found it.
#pragma once

#include "core/lineage.hpp"
#include "cuda_plugin/driver.hpp"
#include "cuda_plugin/task_table.hpp"

namespace gpustasis {

/// Refill the staged memory if it may have been dropped, restore and unlock as far as the task
/// was neither checkpointed nor locked before. Does nothing that is not needed: a task that is
/// already back is left alone. The restore thread must be running. Marks nothing in `record`.
/// `lineage` is that of the dump's image directory.
/// Throws Error or DriverError with what is left undone.
void undo_task(const TaskRecord& record, Driver& driver, Lineage& lineage, unsigned threads);

/// Give the restore thread its signal mask back if criu died while it was thawed.
/// The task must not be traced. Throws Error: io.
void reset_signal_mask(TaskRecord& record);

} // namespace gpustasis
