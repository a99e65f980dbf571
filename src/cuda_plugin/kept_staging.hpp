// SPDX-License-Identifier: Apache-2.0
/// Staged memory that stays in the tasks of a dump, out of criu's sight.
#pragma once

#include "core/image_info.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/hidden_pages.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {

/// A task that the driver is to checkpoint, and bytes of staging that this takes, if that is known.
using ToStage = std::pair<pid_t, std::optional<std::uint64_t>>;

/// What the driver stages for so much GPU memory: 0.4 to 0.7 % more than NVML says, on an H100 (docs/hardware.md); 2 %.
inline std::uint64_t with_margin(std::uint64_t bytes) noexcept {
    return bytes + bytes / 50;
}

/// Why the staging of all `tasks` is not known to fit into memory at once; empty: it does. `root`: as of StagingRoom.
std::string why_not_all_fits(const std::vector<ToStage>& tasks, const std::string& root = "");

/// Of a dump that stores staging. No task is changed, so there is nothing to undo: what is kept is there when the driver
/// restores the task, whoever has it do so.
class KeptStaging {
public:
    /// All outlive it. `pages`: the one of the session, made here if it is needed and not there.
    KeptStaging(const Config& config, Statistics& statistics, std::optional<HiddenPages>& pages)
        : config_(config), statistics_(statistics), pages_(pages) {}

    /// Before anything is done to a CUDA task. Throws Error: unsupported if `staging = "keep"` cannot be done here.
    void prepare();

    /// Of all `tasks`, before the driver works in the first of them.
    void choose(const std::vector<ToStage>& tasks);

    /// Before the driver stages a task: what was kept takes memory still. False, from "auto" alone: there is no room for
    /// this one beside it, so what was kept has to be dropped, and what follows will be. Throws Error: unsupported
    /// where "keep" is asked for by name.
    bool has_room(const ToStage& task);

    /// Whether `regions` stay in a task. Throws Error: unsupported if they cannot, and `staging = "keep"`.
    bool keeps(const std::vector<Region>& regions) const;

    /// Hide `regions` of frozen task `pid`, which its image holds, durable and named in the manifest. Throws Error: the
    /// dump must fail, or criu dumps them.
    void hide(pid_t pid, const std::vector<Region>& regions);

    /// The dump is over: how criu's questions were answered. If it has `succeeded`, warns of what was stored twice.
    void finish(bool succeeded) noexcept;

private:
    const Config& config_;
    Statistics& statistics_;
    std::optional<HiddenPages>& pages_;
    std::string why_not_; ///< why "auto" cannot keep it
    bool keeps_ = false;
    bool any_kept_ = false;
};

} // namespace gpustasis
