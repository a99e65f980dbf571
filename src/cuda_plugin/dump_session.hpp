// SPDX-License-Identifier: Apache-2.0
/// One dump: lock every CUDA task, checkpoint each, take its staged memory out of criu's way, and
/// undo all of it unless the tasks are about to be killed. Of every task, store the CPU memory if asked to.
#pragma once

#include "core/unique_fd.hpp"
#include "cuda_plugin/arena_dump.hpp"
#include "cuda_plugin/complete_images.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/cpu_memory_dump.hpp"
#include "cuda_plugin/driver_facts.hpp"
#include "cuda_plugin/drop.hpp"
#include "cuda_plugin/dump_images.hpp"
#include "cuda_plugin/dump_signature.hpp"
#include "cuda_plugin/dumped_container.hpp"
#include "cuda_plugin/findings.hpp"
#include "cuda_plugin/hidden_pages.hpp"
#include "cuda_plugin/inherited_files.hpp"
#include "cuda_plugin/kept_staging.hpp"
#include "cuda_plugin/packed_dump.hpp"
#include "cuda_plugin/statistics.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/tree_files.hpp"
#include "cuda_plugin/worker.hpp"
#include "dropped_memory/dump_lock.hpp"

#include <sys/types.h>

#include <chrono>
#include <map>
#include <optional>
#include <set>
#include <vector>

namespace gpustasis {

/// Methods are the hooks' bodies; they throw Error, and return false for a task with which nothing was
/// done.
class DumpSession {
public:
    /// `options` win over what the container's policy says.
    DumpSession(const Config& config, PluginOptions options);

    /// The task runs. Lock it; at the first call all of the tree are locked, side by side, for criu freezes one
    /// after the other, and one may wait on its GPU for another. False: not a CUDA task, or it has just ended.
    bool pause(pid_t pid);

    /// Every task is seized. At the first call all are checkpointed; on return of that their staged memory is
    /// durable in their images, and gone from them or hidden from criu. Of the last call: so is CPU memory, if asked for.
    bool checkpoint(pid_t pid);

    /// The dump is over, the tasks are still frozen. Brings every task back to where it was
    /// found, except when `succeeded` and criu is about to kill them: then the worker is left to
    /// watch whether it does (a failing post-dump script makes criu resume them instead).
    void finish(bool succeeded) noexcept;

    /// Device files of the driver that children of CUDA tasks have inherited.
    const InheritedFiles& inherited_files() const noexcept { return inherited_; }

private:
    TaskStatistics& statistics_of(const TaskRecord& record);
    void settle_policy(bool cuda);
    void begin_pack();
    void use_arena();
    void reserve_arena();
    int stored_in() const noexcept { return arena_ ? arena_->directory() : image_dir_.get(); }
    ImagePlace place() const { return {stored_in(), built_on_}; }
    void end_arena(bool succeeded, bool settled) noexcept;
    void watch_images();
    bool was_shown_whole() const noexcept;
    void sign_images();
    void complete_directory();
    [[noreturn]] void refuse(const char* why) noexcept;
    void choose_parent_once();
    void begin();
    void lock_tree();
    bool is_still(const TaskRecord& record) const;
    TaskRecord* look_at(pid_t pid);
    TaskRecord* look_at_cuda(pid_t pid, bool& asked);
    void lock(const std::vector<TaskRecord*>& records, pid_t asked);
    void checkpoint_tree(pid_t asked);
    void close_left(pid_t pid);
    void require_checkpointed(TaskRecord& record);
    void prepare_direct(TaskRecord& record, TaskStatistics& statistics);
    void take_direct(TaskRecord& record, TaskStatistics& statistics);
    void add_times(const TaskRecord& record, std::chrono::steady_clock::duration waited);
    struct AtWork;
    Worker::Call begin_checkpoint(AtWork& task);
    void end_checkpoint(AtWork& task);
    void externalize(TaskRecord& record, const std::vector<Region>& regions,
                     TaskStatistics& statistics);
    void drop(TaskRecord& record, const std::vector<Region>& regions, TaskStatistics& statistics);
    void drop_kept(pid_t asked);
    ManifestTask entry_of(const TaskRecord& record);
    void note(CpuMemoryDump::Noted noted);
    struct GoingBack;
    void undo_tree() noexcept;
    void undo(TaskRecord& record) noexcept;
    void refill(TaskRecord& record);
    void record_before_thaw(const TaskRecord& record);
    std::uint64_t missing_in(const TaskRecord& record);
    void settle_dead(TaskRecord& record) noexcept;
    void tell_left(const TaskRecord& record, const char* why) noexcept;

    Config config_;
    PluginOptions options_;
    pid_t root_ = 0; ///< of the tree: the first that criu asks about
    TreeFiles files_;
    DumpedContainer container_;
    UniqueFd image_dir_;
    std::optional<ArenaDump>
        arena_; ///< tier = "ram", once it is known that there is memory to store
    std::optional<Lineage> image_dir_lock_; ///< of a dump into memory
    Lineage lineage_;                       ///< of the directory that images of ours go into
    UndoImages undo_images_;
    SharedTaskTable table_;
    std::vector<DumpLock> locks_;                  ///< of the tasks in the table
    std::map<pid_t, Guard> guards_;                ///< of dropped memory, by task as criu sees it
    std::map<pid_t, std::vector<Region>> staging_; ///< of CUDA tasks that are checkpointed
    std::vector<UnusedUserfaultfd> closed_;        ///< that were left in the tasks
    std::set<pid_t> looked_at_;                    ///< for one of these
    InheritedFiles inherited_;
    Worker worker_;
    StagingRoom staging_room_;
    Statistics statistics_;
    DumpImages images_;
    std::optional<HiddenPages>
        hidden_pages_; ///< of all that criu is not told of; none: nobody needs it
    KeptStaging kept_staging_;
    CpuMemoryDump cpu_memory_;
    std::optional<DumpSignature> signature_; ///< none: nobody signs it
    std::optional<CompleteImages>
        complete_; ///< none: packed, nothing is noted, or this criu does not allow it
    std::optional<PackedDump> packed_; ///< layout = "packed"
    bool images_watched_ = false;
    bool sent_pages_ = false; ///< to a page server, by criu
    bool is_whole_ = false;   ///< criu has written all of its images, not packed
    bool is_refused_ = false; ///< by refuse()
    bool policy_settled_ = false;
    bool parent_chosen_ = false;
    std::vector<BuiltOn> built_on_; ///< once it is
    bool begun_ = false;            ///< the driver has been asked
    bool checkpointed_ = false;     ///< checkpoint_tree() has begun
};

} // namespace gpustasis
