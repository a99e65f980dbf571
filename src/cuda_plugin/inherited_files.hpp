// SPDX-License-Identifier: Apache-2.0
/// Device files of the driver in processes that a CUDA process has forked, as workers that load data are.
///
/// A child inherits its parent's device files and their mappings, and can use neither: the driver's state
/// is the parent's, and every call of the child ends with CUDA_ERROR_NOT_INITIALIZED. The driver closes the
/// parent's at a checkpoint; those of the child stay, and CRIU can dump none of them. Nothing is done to
/// the child. In the checkpoint /dev/zero stands for each mapping, and /dev/null for each file. Page-locked memory, which a
/// child can read, is shared memory like any other (seen of cuMemHostAlloc without flags): CRIU dumps that.
#pragma once

#include "cuda_plugin/device_files.hpp"
#include "cuda_plugin/task_table.hpp"
#include "tracee/task_maps.hpp"

#include <sys/stat.h>
#include <sys/types.h>

#include <optional>
#include <vector>

namespace gpustasis {

/// A CUDA task that others may have been forked by; what it has open, and maps of devices and libraries of
/// the driver's.
struct PossibleParent {
    const TaskRecord* record = nullptr;
    std::vector<DeviceFile> files;
    std::vector<Mapping> mappings;
};

class InheritedFiles {
public:
    /// Look at task `pid`, which is frozen and in no record of `cuda_tasks`; these are frozen too, and as the
    /// dump has found them: of one that was checkpointed already the driver has closed the device files. Throws
    /// Error: unsupported, naming one, if it has device files or mappings of the driver that it has not
    /// inherited from any of them; io.
    void look_at(pid_t pid, TaskTable& cuda_tasks);

    /// CUDA task `pid` has been checkpointed. Throws Error: unsupported if a device of the driver is left in it, for which
    /// something would be put in place here because others are heirs; io.
    void require_none_left(pid_t pid) const;

    /// Of a mapping that CRIU asks about, `fd` is its file, and `status` what CRIU knows of it: have CRIU
    /// dump a mapping of /dev/zero in its place. False: no device of the driver's, or no task has inherited
    /// any. Throws Error: io if there is no /dev/zero where the task lives.
    bool replace_mapped(int fd, struct stat& status) const;

    /// Whether `fd`, which CRIU cannot dump, is a device of the driver that a task may have inherited.
    bool is_open_in_heir(int fd) const;

    /// What stands for such a file after a restore, in the task that is being made. The caller owns it. Throws Error: io.
    static int open_stand_in();

private:
    std::optional<std::vector<PossibleParent>>
        parents_;              ///< read once, for the first heir: they are frozen
    std::vector<pid_t> heirs_; ///< have inherited such files, and have no others
};

} // namespace gpustasis
