// SPDX-License-Identifier: Apache-2.0
/// The CPU memory of a tree in one dump: into images of ours, and out of criu's sight.
#pragma once

#include "core/manifest.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/dump_images.hpp"
#include "cuda_plugin/hidden_data.hpp"
#include "cuda_plugin/hidden_pages.hpp"
#include "cuda_plugin/shared_memory.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace gpustasis {

/// No task is changed, so there is nothing to undo, whatever happens.
class CpuMemoryDump {
public:
    /// All outlive it. `pages`: the one of the session, made here if it is needed and not there.
    CpuMemoryDump(const Config& config, DumpImages& images, Statistics& statistics,
                  std::optional<HiddenPages>& pages)
        : config_(config), images_(images), statistics_(statistics), pages_(pages) {}

    /// Before anything is frozen. Throws Error: unsupported if `cpu_memory = "ours"` cannot be done here.
    void prepare();

    /// Whether memory is taken at all.
    bool is_on() const noexcept { return data_.has_value(); }

    /// The frozen task `pid`: no driver works in it any more. `staging` is its GPU memory. Its memory is looked
    /// at when no driver works in any other task either: what tasks share may be written by each.
    void add(pid_t pid, const std::vector<Region>& staging);

    /// Whether every task of the tree was added, and nothing was taken yet.
    bool is_complete() const noexcept { return awaited_ && awaited_->empty() && !taken_; }

    /// Entries for the manifest, and whose they are.
    using Noted = std::vector<std::pair<ManifestTask, pid_t>>;
    /// Puts all of them into the manifest.
    using Note = std::function<void(Noted)>;

    /// Of all tasks that were added, store what is to be stored, `note` it once, and hide it from criu.
    /// `choose_parent` is called before anything is stored. False: all is left to CRIU. Throws
    /// Error: the dump must fail.
    bool take(const std::function<void()>& choose_parent, const Note& note);

    /// The dump is over: how criu's questions were answered. If it has `succeeded`, warns of what was
    /// stored twice, and if nothing could be stored because criu did not ask about every task; else
    /// criu may not have asked yet.
    void finish(bool succeeded) noexcept;

private:
    /// Of a task, what its image holds.
    struct Stored {
        ManifestTask entry;
        pid_t pid = 0;
        std::vector<Region> own;
        std::vector<SharedPart> shared;
    };
    std::vector<SharingTask> look_at_tasks();
    bool may_be_worthwhile(const SharingTask& task) const noexcept;
    void look_at_flags(std::vector<SharingTask>& tasks);
    std::vector<SharedPart> find_shared(const std::vector<SharingTask>& tasks);
    std::optional<Stored> store(const SharingTask& task, std::vector<SharedPart> shared,
                                CpuMemoryStatistics& told,
                                const std::function<void()>& choose_parent);
    void hide(const Stored& stored, HiddenPages& pages, HiddenData& data);
    bool may_store(CpuMemoryStatistics& told, const std::function<void()>& choose_parent);
    void refuse_same_inner_pid(std::uint32_t inner_pid);

    const Config& config_;
    DumpImages& images_;
    Statistics& statistics_;
    std::optional<HiddenPages>& pages_;
    std::optional<HiddenData> data_;           ///< if memory is taken: pages_ is there as well then
    std::optional<std::set<pid_t>> awaited_;   ///< tasks that were not added yet
    std::vector<SharingTask> added_;           ///< pids and staging
    bool taken_ = false;                       ///< once: a task that comes later is left to CRIU
    std::map<SharedFileId, SharedFile> files_; ///< shared memory that images are to hold
    std::map<pid_t, std::uint32_t>
        inner_pids_; ///< of all tasks of the tree, in the innermost namespace
};

} // namespace gpustasis
