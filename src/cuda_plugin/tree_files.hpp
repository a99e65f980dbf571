// SPDX-License-Identifier: Apache-2.0
/// What the tasks of a tree that is being dumped have mapped: the manifest's record of it.
#pragma once

#include "core/requirements.hpp"
#include "cuda_plugin/task_table.hpp"
#include "tracee/mapped_files.hpp"

#include <sys/types.h>

#include <optional>
#include <set>
#include <span>
#include <vector>

namespace gpustasis {

class TreeFiles {
public:
    /// A task of the tree; the root first.
    void add_task(pid_t pid) { tasks_.push_back(pid); }

    /// All tasks are frozen: look at those that are not in `cuda_tasks`. Once; later calls do nothing.
    void look_at_others(SharedTaskTable& cuda_tasks) noexcept;

    /// With what `tasks` have mapped, of those that were not looked at before. One of `cuda_tasks` the driver
    /// has checkpointed: until then it has device memory mapped, which is gone in the dump. nullopt,
    /// with a warning in criu's log: this cannot be recorded, for which no dump fails.
    std::optional<Requirements> with(std::span<const pid_t> tasks) noexcept;

private:
    void look_at(MappedFiles& files, pid_t task);
    template <class Body>
    void guarded(const Body& body) noexcept;

    std::vector<pid_t> tasks_;
    std::optional<MappedFiles> files_;
    std::set<pid_t> done_; ///< are in files_
    bool looked_ = false;
    bool failed_ = false;
};

} // namespace gpustasis
