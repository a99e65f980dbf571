/// Taking staged memory out of a task, and refusing a task that lacks memory already.
#pragma once

#include "core/image_info.hpp"
#include "cuda_plugin/task_table.hpp"

#include <sys/types.h>

#include <vector>

namespace gpustasis {

/// Throws Error: unsupported, with what to do, if an earlier dump has taken memory out of task `pid`
/// and not put it back: zeros in place of it would look like a checkpoint. `with_tree`: the same for
/// every task below it. As DropRecords::find().
void refuse_missing_memory(pid_t pid, bool with_tree);

/// Drop the pages of `regions`, which the image of `record` holds, durable and named in the manifest;
/// write the record of that before. The restore thread must be this process's tracee and stopped.
/// Throws Error: io.
void drop_staging(TaskRecord& record, const std::vector<Region>& regions, int image_dir);

} // namespace gpustasis
