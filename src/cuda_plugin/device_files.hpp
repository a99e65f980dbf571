// SPDX-License-Identifier: Apache-2.0
/// Device files of the driver that a task has open.
#pragma once

#include "cuda_plugin/task_table.hpp"

#include <sys/types.h>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace gpustasis {

inline constexpr std::string_view kDriverDevice = "/dev/nvidia"; ///< their names begin so

/// Whether this path is one of a device of the NVIDIA driver.
bool is_driver_device(std::string_view path);

/// The path that a link of /proc leads to; empty: there is no such link.
std::string link_of(const std::string& link);

struct DeviceFile {
    int fd = -1;
    std::string path;
};

/// Those of task `pid`. Throws Error: io.
std::vector<DeviceFile> device_files(pid_t pid);

/// Their descriptors, ascending; nullopt: they cannot be read now.
std::optional<std::vector<int>> driver_descriptors(pid_t pid) noexcept;

/// Once the driver has restored a task: have its device files closed when the task executes another program, as all
/// were before the checkpoint. Restore opens every second one so that programs would inherit it (580.159.04,
/// docs/hardware.md). `before`: what driver_descriptors() gave while the task was checkpointed, and is left as it is. The restore
/// thread must be in an event stop of ours. What fails is told in criu's log: the task is well without.
void close_on_exec(TaskRecord& record, const std::optional<std::vector<int>>& before) noexcept;

} // namespace gpustasis
