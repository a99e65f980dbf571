// SPDX-License-Identifier: Apache-2.0
/// What is known to end badly for a job, looked for while it runs and nothing has been done to it: see
/// "What stops a dump" in docs/operating.md.
#pragma once

#include "cuda_plugin/config.hpp"
#include "cuda_plugin/driver.hpp"

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// Something that `risk` has to name, or the dump is refused.
struct Finding {
    const char* risk = ""; ///< its name, of namespace risk
    std::string text;      ///< what was found and what to do, in a sentence without full stop
};

/// Throws Error: unsupported if a thread that answers the driver in `pid`, above all its restore
/// thread `tid`, is stopped: Lock would hang then, whatever its timeout.
void require_answering(pid_t pid, pid_t tid);

/// What Checkpoint, which gives an error then, is known to destroy: programs with managed memory, with
/// NCCL, or with CUDA IPC, by the driver's API version. `cuda_tasks`: in the tree so far, this one
/// with them. Throws Error: io if the task is gone.
std::vector<Finding> find_risks(pid_t pid, std::uint32_t api_version, std::size_t cuda_tasks);

/// Whether the task belongs to a job of CUDA IPC (CUDA_CHECKPOINT_JOB_FILE in its environment), for whose tasks
/// the driver has to be called one after the other: it writes to the job's file. One that has ended does not.
bool is_of_ipc_job(pid_t pid);

/// The host memory that the driver takes for staged GPU memory. It is charged to the task's cgroups,
/// whose limit kills the job.
class StagingRoom {
public:
    /// `root` is put before /proc and before the mount points of the cgroups: for tests.
    explicit StagingRoom(std::string root = "") : root_(std::move(root)) {}

    /// Count `bytes` for task `pid`. A finding if they, with those of the tasks before, do not fit into
    /// the limits of its cgroups (v1 and v2, each level) or into the free memory of the host.
    /// Throws Error: io if the task is gone.
    std::optional<Finding> add(pid_t pid, std::uint64_t bytes);

private:
    std::string root_;
    std::map<std::string, std::uint64_t> asked_; ///< bytes, by directory of a cgroup; "": the host
};

/// Look for all of that in task `pid`, which uses `gpus`, and whose memory the driver stages, or not; the other
/// parameters as of find_risks.
/// Returns what was found and is allowed by `config` (key `risk`), in a sentence each, and warns of it
/// in criu's log. Throws Error: unsupported with what to do for what is not allowed; io.
std::vector<std::string> take_risks(pid_t pid, std::uint32_t api_version, std::size_t cuda_tasks,
                                    const ProcessGpus& gpus, bool stages, StagingRoom& room,
                                    const Config& config);

} // namespace gpustasis
