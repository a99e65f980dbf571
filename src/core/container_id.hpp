// SPDX-License-Identifier: Apache-2.0
/// Which container a task belongs to, as its cgroups tell.
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace gpustasis {

/// The ids of containers in `task`, the text of /proc/PID/cgroup: ascending, each once; usually one
/// or none. An id is 64 lowercase hex digits, as engines give it; they put it into the name of a
/// cgroup: "libpod-ID.scope", "cri-containerd-ID.scope", "crio-ID.scope", "docker-ID.scope",
/// "libpod-payload-ID", "ID". Of each hierarchy the first such name counts, for those below are the
/// container's own to give; but names that `own`, the text of criu's, has as well are a place that
/// both are in, and do not count.
std::vector<std::string> container_ids(std::string_view task, std::string_view own);

} // namespace gpustasis
