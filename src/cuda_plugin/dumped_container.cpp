// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/dumped_container.hpp"

#include "core/container_id.hpp"
#include "core/error.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/policy.hpp"
#include "cuda_plugin/proc.hpp"

#include <string>
#include <utility>

namespace gpustasis {

void DumpedContainer::settle(pid_t root, Config& config, const PluginOptions& options) {
    ids_ = container_ids(proc::read_file("/proc/" + std::to_string(root) + "/cgroup"),
                         proc::read_file("/proc/self/cgroup"));
    Config settled = find_config(
        options, [&](Config& below) { policy_ = PolicyDirectory().apply(below, ids_); });
    if (!policy_.empty())
        config = std::move(settled);
}

void DumpedContainer::open_store(pid_t root, const Config& config) {
    if (!config.incremental)
        return;
    const std::vector<std::string> ids = policy_.empty() ? ids_ : std::vector{policy_};
    if (!config.parent.empty())
        throw Error(Errc::bad_argument, "parent = \"" + config.parent +
                                            "\": not together with incremental, which chooses the "
                                            "parent itself");
    if (!config.externalize)
        throw Error(Errc::bad_argument, "incremental: needs externalize, which is off");
    if (ids.size() > 1)
        throw Error(Errc::bad_argument, "incremental: the task's cgroups name two containers, " +
                                            ids[0] + " and " + ids[1]);
    if (ids.empty())
        throw Error(Errc::bad_argument, "incremental: none of the cgroups of pid " +
                                            std::to_string(root) + " names a container");
    store_.emplace(ids[0]);
}

void DumpedContainer::refuse_arena() const {
    if (!ids_.empty())
        throw Error(Errc::unsupported,
                    "tier = \"ram\": not for a container (" + ids_.front() +
                        "): its engine takes the image directory away before it is drained");
}

void DumpedContainer::keep(int image_dir, const Id& checkpoint_id, Statistics& statistics) const {
    if (!store_)
        return;
    try {
        statistics.phases.time("store", [&] { store_->keep(image_dir, checkpoint_id); });
        host::info("kept in " + store_->path() + " for the next checkpoint of the container");
    } catch (const Error& e) {
        host::warn("not kept for the next checkpoint of the container: " + std::string(e.what()));
        statistics.not_kept_because = e.what();
    }
}

void DumpedContainer::mark_checkpointed() const {
    if (!policy_.empty())
        PolicyDirectory().mark_checkpointed(policy_);
}

} // namespace gpustasis
