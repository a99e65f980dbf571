// SPDX-License-Identifier: Apache-2.0
/// The CPU memory of a tree in one dump: into images of ours, and out of criu's sight.
#pragma once

#include "core/manifest.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/dump_images.hpp"
#include "cuda_plugin/hidden_pages.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace gpustasis {

/// No task is changed, so there is nothing to undo, whatever happens.
class CpuMemoryDump {
public:
    /// All outlive it.
    CpuMemoryDump(const Config& config, DumpImages& images, Statistics& statistics)
        : config_(config), images_(images), statistics_(statistics) {}

    /// Before anything is frozen. Throws Error: unsupported if `cpu_memory = "ours"` cannot be done here.
    void prepare();

    /// Whether memory is taken at all.
    bool is_on() const noexcept { return hidden_.has_value(); }

    /// Store what is to be stored of the frozen task `pid`, in which nothing runs any more, and hide it
    /// from criu. `staging` is GPU memory; `choose_parent` is called before anything is stored. Gives
    /// the entry of the manifest, which is to be noted; nullopt: all is left to CRIU. Throws Error: the
    /// dump must fail.
    std::optional<ManifestTask> take(pid_t pid, const std::vector<Region>& staging,
                                     const std::function<void()>& choose_parent);

    /// The dump is over: how criu's questions were answered. If it has `succeeded`, warns of what
    /// was stored twice; else criu may not have asked yet.
    void finish(bool succeeded) noexcept;

private:
    bool may_store(CpuMemoryStatistics& told, const std::function<void()>& choose_parent);
    void refuse_same_inner_pid(std::uint32_t inner_pid);

    const Config& config_;
    DumpImages& images_;
    Statistics& statistics_;
    std::optional<HiddenPages> hidden_;
    std::map<std::uint32_t, unsigned>
        tasks_with_pid_; ///< of the tree, by pid in the innermost namespace
};

} // namespace gpustasis
