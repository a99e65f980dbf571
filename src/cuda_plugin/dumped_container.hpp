// SPDX-License-Identifier: Apache-2.0
/// The container that a dump is of, if it is of one: its policy and its store.
#pragma once

#include "cuda_plugin/config.hpp"
#include "cuda_plugin/container_store.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

class DumpedContainer {
public:
    /// Of the tree whose first task is `root`. If its container has a policy, `config` is found anew,
    /// with the policy at its place in the order (find_config). Throws Error: io; bad_argument if the
    /// policy cannot be used.
    void settle(pid_t root, Config& config, const PluginOptions& options);

    /// Open the store if `config`, which is settled, is `incremental`. Throws Error: io; bad_argument if that
    /// cannot be done.
    void open_store(pid_t root, const Config& config);

    /// Throws Error: unsupported if this is a container, whose engine would take the image directory away before what
    /// lies in memory is drained into it.
    void refuse_arena() const;

    /// Nullptr: checkpoints of this tree are not kept.
    const ContainerStore* store() const noexcept { return store_ ? &*store_ : nullptr; }

    /// Keep that checkpoint in the store, if there is one. It is good without that, and the next can be built on
    /// what the store had before.
    void keep(int image_dir, const Id& checkpoint_id, Statistics& statistics) const;

    /// It ends now, by a checkpoint, and may come back. Throws Error: io.
    void mark_checkpointed() const;

private:
    std::vector<std::string> ids_; ///< that the cgroups of the first task name
    std::string policy_;           ///< id of the container whose policy was found, or empty
    std::optional<ContainerStore> store_;
};

} // namespace gpustasis
