// SPDX-License-Identifier: Apache-2.0
/// One dump: lock every CUDA task, checkpoint each, take its staged memory out of criu's way, and
/// undo all of it unless the tasks are about to be killed.
#pragma once

#include "core/manifest.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver_facts.hpp"
#include "cuda_plugin/drop.hpp"
#include "cuda_plugin/dumped_container.hpp"
#include "cuda_plugin/findings.hpp"
#include "cuda_plugin/parent_choice.hpp"
#include "cuda_plugin/statistics.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/worker.hpp"
#include "dropped_memory/dump_lock.hpp"

#include <sys/types.h>

#include <map>
#include <vector>

namespace gpustasis {

/// Methods are the hooks' bodies; they throw Error, and return false for a task that has nothing
/// to do with CUDA.
class DumpSession {
public:
    /// `options` win over what the container's policy says.
    DumpSession(const Config& config, PluginOptions options);

    /// The task runs. Lock it. False: not a CUDA task, or it has just ended.
    bool pause(pid_t pid);

    /// Every task is seized. Checkpoint this one; on return its staged memory is durable in its
    /// image and gone from the task.
    bool checkpoint(pid_t pid);

    /// The dump is over, the tasks are still frozen. Brings every task back to where it was
    /// found, except when `succeeded` and criu is about to kill them: then the worker is left to
    /// watch whether it does (a failing post-dump script makes criu resume them instead).
    void finish(bool succeeded) noexcept;

private:
    TaskStatistics& statistics_of(const TaskRecord& record);
    void choose_parent_once();
    void begin();
    /// `asked`: set once the driver has been asked to work in the task.
    bool pause_task(pid_t pid, bool& asked);
    void lock(TaskRecord& record, TaskStatistics& statistics);
    void require_checkpointed(TaskRecord& record);
    void run_driver_checkpoint(TaskRecord& record, TaskStatistics& statistics);
    void externalize(TaskRecord& record, const std::vector<Region>& regions,
                     TaskStatistics& statistics);
    void refuse_same_inner_pid(pid_t pid, std::uint32_t inner_pid);
    void note_in_manifest(const TaskRecord& record, bool externalized, const Id& digest);
    void note_in_inventory(bool externalized);
    void undo(TaskRecord& record) noexcept;

    void keep_in_store();

    Config config_;
    PluginOptions options_;
    pid_t root_ = 0; ///< of the tree: the first that criu asks about
    DumpedContainer container_;
    UniqueFd image_dir_;
    Lineage lineage_;
    SharedTaskTable table_;
    std::vector<DumpLock> locks_;   ///< of the tasks in the table
    std::map<pid_t, Guard> guards_; ///< of dropped memory, by task as criu sees it
    Worker worker_;
    ParentChoice parent_;
    StagingRoom staging_room_;
    Manifest manifest_;
    Statistics statistics_;
    bool parent_chosen_ = false;
    bool begun_ = false;
    bool named_ours_ = false;
    bool named_stock_ = false;
};

/// The name in inventory.img of a checkpoint that only this plugin can restore.
inline constexpr const char* kInventoryName = "gpustasis";
/// The name of one that the stock CUDA plugin can restore too.
inline constexpr const char* kStockInventoryName = "cuda_plugin";
/// Ties CRIU's images to one manifest: "checkpoint-<checkpoint id in hex>". None of the three may
/// begin with another: CRIU compares only as many bytes as it is asked for.
std::string inventory_id_name(const Id& checkpoint_id);

} // namespace gpustasis
