// SPDX-License-Identifier: Apache-2.0
/// Processes that keep dropped memory from reading as zeros when criu is gone.
///
/// What a dump drops stands behind a userfaultfd (dropped_memory/missing_pages.hpp). criu holds its
/// descriptor, and for each task a guardian and its spare, which does nothing until the guardian
/// has died: only when all three have died do missing pages become zeros. A guardian answers whoever
/// waits for a page from the image. When criu is gone, or has left the task alive without a word,
/// it puts all pages back, removes the record of the drop and ends; it ends as well when that has been
/// done by criu, and when the task is dead.
#pragma once

#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "dropped_memory/missing_pages.hpp"

namespace gpustasis {

/// What a guardian is called in /proc/PID/comm.
inline constexpr const char* kGuardianName = "gpustasis-guard";

/// Start both for the task of `record`, whose memory stands behind `pages` already and is still
/// there; they hold on to it when this returns.
/// Throws Error: io.
void start_guardians(TaskRecord& record, const TaskTable& table, MissingPages& pages,
                     UndoImages& images, unsigned threads);

/// For the worker, when criu is gone: whether a guardian of `record` is alive that has not put all
/// pages back yet. It holds on to them until the task ends.
bool is_guarded(const TaskRecord& record) noexcept;

} // namespace gpustasis
