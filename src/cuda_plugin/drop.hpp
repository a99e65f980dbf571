// SPDX-License-Identifier: Apache-2.0
/// Taking staged memory out of a task, and refusing a task that lacks memory already.
#pragma once

#include "core/image_info.hpp"
#include "core/lineage.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/undo_images.hpp"
#include "dropped_memory/drop_record.hpp"
#include "dropped_memory/dump_lock.hpp"
#include "dropped_memory/missing_pages.hpp"
#include "tracee/userfaultfd_record.hpp"

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// Throws Error: unsupported, with what to do, if an earlier dump has taken memory out of task `pid`
/// and not put it back: zeros in place of it would look like a checkpoint. `with_tree`: the same for
/// every task below it. As DropRecords::find().
void refuse_missing_memory(pid_t pid, bool with_tree);

/// The same for task `pid`, which the driver says is checkpointed, if its GPU memory was handed over to an earlier dump
/// that was broken off.
void refuse_handed_over(pid_t pid);

/// Throws Error: unsupported, with what to do, if images in `image_dir` hold memory that an earlier dump has taken
/// out of a task and not put back, or are what the images of that dump are built on: a dump into this directory would
/// replace them. As DropRecords::list().
void refuse_needed_images(int image_dir);

/// Throws what kept `lock` from being taken if `drops`, else warns of it: what a second dump could ruin
/// is memory that the first has taken out.
void require_lock(const DumpLock& lock, bool drops);

/// Where the images of a dump are, and what they are built on.
struct ImagePlace {
    int directory = -1;
    std::vector<BuiltOn> built_on;
};

/// What the checkpoint that `lineage` is of is built on: the next `count` directories of the chain, and of those in memory
/// their image directories too. From the first on that cannot be looked at they are missing, with a warning.
std::vector<BuiltOn> read_built_on(Lineage& lineage, std::uint32_t count);

/// Write down that the driver is about to checkpoint the task of `record` for the dump into
/// `place`. Throws Error: io, bad_argument, corrupt_data; only warns unless `required`.
void record_checkpoint(const TaskRecord& record, const ImagePlace& place, bool required);

/// The task of `record` was running: an earlier dump that was killed may have found it locked, and its record is not to
/// say that any more once this dump locks it.
void note_found_running(const TaskRecord& record);

/// If an earlier dump was killed and has left the restore thread of a frozen task the signal mask of a dump, give it its
/// own back, by the record of that dump.
void give_own_signals(const TaskRecord& record);

/// Close the userfaultfd that a dump or a DirtyTracker which was killed has left in process `pid`, if one has:
/// CRIU dumps no process that has one open. `record`: of a CUDA task, whose restore thread does it then.
/// What cannot be closed is warned of. `closed`: what this dump has closed, here and in the processes before:
/// children that were forked meanwhile have it as well. Every thread of the process must be this process's
/// tracee and stopped.
void close_left_userfaultfd(pid_t pid, TaskRecord* record, std::vector<UnusedUserfaultfd>& closed);

/// What dropped memory stands behind.
struct Guard {
    std::optional<MissingPages> pages; ///< none: the memory is not guarded
    std::string why_not;               ///< empty if it is
};

/// Drop the pages of `regions`, which the image of `record` holds, durable and named in the manifest.
/// Before, write the record of that, put the regions behind a userfaultfd and start guardians; where
/// the kernel allows no userfaultfd, do without if `required` is false. `images` are those of this dump, in `place`. The restore thread must be this process's tracee and stopped.
/// `guard` is filled before the first page goes, and is the caller's also if this throws: it alone can
/// put pages back before criu ends. Throws Error: unsupported, io.
void drop_staging(Guard& guard, TaskRecord& record, const std::vector<Region>& regions,
                  const TaskTable& table, UndoImages& images, const ImagePlace& place,
                  unsigned threads, bool required);

} // namespace gpustasis
