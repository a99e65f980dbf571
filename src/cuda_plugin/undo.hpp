// SPDX-License-Identifier: Apache-2.0
/// Bring a task back to where the dump found it.
#pragma once

#include "cuda_plugin/driver.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "dropped_memory/missing_pages.hpp"
#include "dropped_memory/refill.hpp"

namespace gpustasis {

/// What is missing in the task of `record`.
DroppedTask dropped_task(const TaskRecord& record);

/// Put the staged memory back if it may have been dropped and is not back yet, and remove the record
/// of the drop. Needs no thread of the task to run.
/// `pages`: what the memory stands behind, if this process holds it; else no guardian may be at work on
/// it, and is_drop_over() must be true. Throws Error: as open_dropped() and refill_dropped().
void refill_task(TaskRecord& record, const UndoImages& images, unsigned threads,
                 MissingPages* pages);

/// Restore and unlock as far as the task was neither checkpointed nor locked before: after
/// refill_task(). Does nothing that is not needed: a task that is already back is left alone. The
/// restore thread must be running. Throws Error or DriverError with what is left undone.
void undo_task(const TaskRecord& record, Driver& driver);

/// The two halves of undo_task(): of several tasks at once all are restored before any is unlocked.
void undo_restore(const TaskRecord& record, Driver& driver);
void undo_unlock(const TaskRecord& record, Driver& driver);

/// Remove the record of the drop: all memory is back, or the task is dead. Errors are lost: the job
/// comes first, and a record that stays only has later dumps of the task refused.
void forget_drop(TaskRecord& record) noexcept;

/// Remove the record that this dump has had the task checkpointed: it runs again, and its restore thread has its signals
/// back, or it is dead. Errors are lost: a record that stays says nothing wrong of this task.
void forget_checkpoint(const TaskRecord& record) noexcept;

/// Give the restore thread its signal mask back if criu died while it was thawed.
/// The task must not be traced. Throws Error: io.
void reset_signal_mask(TaskRecord& record);

/// Whether the driver would wait for that thread for ever. No thread, 0, and one that has ended are not: the driver says
/// what that means.
bool is_stopped(pid_t tid) noexcept;

/// Whether the task has not died, nor is traced, as by another dump.
bool is_free(const TaskRecord& record) noexcept;

} // namespace gpustasis
