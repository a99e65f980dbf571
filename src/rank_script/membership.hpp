// SPDX-License-Identifier: Apache-2.0
/// Which rank of which job a container is: what the OCI hook has left of its annotations.
#pragma once

#include <sys/types.h>

#include <optional>
#include <string>

namespace gpustasis {

struct Membership {
    std::string container; ///< its id
    std::string job;
    std::string rank;
};

/// Whether the container's criu is dumping it, or restoring it: then the kernel may have criu in the
/// container's cgroup already.
enum class Way { dump, restore };

/// Of the container that process `pid` is in; none: it is in no container, or in one that is no rank.
/// Throws Error: io; bad_argument naming the policy file that cannot be believed.
std::optional<Membership> find_membership(pid_t pid, Way way);

} // namespace gpustasis
