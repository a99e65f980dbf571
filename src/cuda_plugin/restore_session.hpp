// SPDX-License-Identifier: Apache-2.0
/// One restore: check beforehand what can be checked, then give each task its CPU memory and each CUDA task
/// its staged memory back, and have the driver restore it; kill everything that was made if that fails.
#pragma once

#include "core/lineage.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver_facts.hpp"
#include "cuda_plugin/exit_kill.hpp"
#include "cuda_plugin/image_redirect.hpp"
#include "cuda_plugin/restore_images.hpp"
#include "cuda_plugin/statistics.hpp"
#include "cuda_plugin/task_table.hpp"
#include "cuda_plugin/worker.hpp"

#include <sys/types.h>

#include <deque>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

class RestoreSession {
public:
    explicit RestoreSession(const Config& config);

    /// Before anything is created: read and check the images, the driver and the GPUs. False: the
    /// checkpoint is none of this plugin. Throws Error with the reason to refuse.
    bool prepare();

    /// The restored tasks are complete but for their GPUs, and stopped. False: this one is no CUDA task. At the
    /// first call all are given their memory and restored, side by side, and when all are restored they are
    /// unlocked: then the restore is complete, and the worker that would kill the tree if criu died is told to end.
    /// On failure every task that criu has made is killed before the Error is thrown, and in a pid
    /// namespace of their own all have ended but the first: criu itself ignores what this hook
    /// returns, stumbles over the dead tasks, and waits for that one.
    bool resume(pid_t pid);

    void finish(bool succeeded) noexcept;

    /// Whether the checkpoint has something in place of files of the driver's devices.
    bool has_inherited_files() const noexcept { return images_.has_inherited_files(); }

private:
    void unpack();
    void check_machine();
    bool uses_driver() const noexcept;
    void begin_resuming();
    void resume_tree(pid_t asked);
    struct AtWork;
    void look_at(pid_t pid, std::deque<AtWork>& tasks);
    std::uint64_t staged_of(const TaskRecord& record) const;
    std::vector<Id> gpus_for(const ImageInfo& info, const std::vector<GpuMove>& moves) const;
    std::pair<std::vector<Id>, std::size_t> gpus_ahead() const;
    void expect_direct(TaskRecord& record, const ImageReader& image);
    void refill_staging(TaskRecord& record, const ImageReader& image, TaskStatistics& statistics);
    std::optional<Worker::Call> begin_restore(AtWork& task);
    std::optional<Worker::Call> begin_unlock(AtWork& task);
    void expect_death_of(const std::vector<pid_t>& tree);
    void complete() noexcept;
    void kill_all(const std::string& error) noexcept;
    void refuse_detach(pid_t tid);
    void write_failure(const std::string& error) noexcept;

    Config config_;
    UniqueFd image_dir_;
    Lineage lineage_;
    UndoImages undo_images_; ///< for the worker, which gives GPU memory back out of them
    SharedTaskTable table_;
    Worker worker_;
    RestoreImages images_;
    std::optional<ImageRedirect> unpacked_; ///< of a packed checkpoint
    std::optional<ExitKill> exit_kill_;     ///< if an image of ours holds memory
    Placement placement_;
    Statistics statistics_;
    std::vector<pid_t> tree_; ///< every task that criu has made
    std::set<pid_t> waiting_; ///< tasks that use CUDA and have not been resumed
    std::set<pid_t> resumed_; ///< those that have
    bool prepared_ = false;   ///< prepare() found a checkpoint of ours and nothing against it
    bool resuming_ = false;   ///< the tree stands; waiting_ is filled
    bool failed_ = false;     ///< all is killed, and what criu still calls for is too
    bool ended_ = false;      ///< all is restored, or all is killed; it has been told
};

} // namespace gpustasis
