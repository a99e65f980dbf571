// SPDX-License-Identifier: Apache-2.0
/// Names of tasks that hold in every pid namespace, and where files about tasks are kept.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>

namespace gpustasis {

/// A task, the same whichever pid namespace it is seen from, until the machine boots again.
struct TaskIdentity {
    std::uint64_t pid_namespace = 0; ///< inode of its innermost pid namespace
    std::uint32_t inner_pid = 0;     ///< its id in that namespace
    std::uint64_t start_time = 0;    ///< field 22 of /proc/PID/stat

    bool operator==(const TaskIdentity&) const = default;
};

/// Throws Error: io if there is no such task.
TaskIdentity identify_task(pid_t pid);

/// What a file about `task` is called.
std::string file_name(const TaskIdentity& task);

/// The task that a file of that name is about; nullopt: it is no such name.
std::optional<TaskIdentity> task_of_file(const char* name);

/// Where a program of `user` keeps what does not outlive a boot: /run, or /run/user/UID.
std::string run_directory(uid_t user);
std::string run_directory(); ///< of the user that this program runs as

/// Inode of the innermost pid namespace of a process: its id in digits, or "self".
/// Throws Error: io.
std::uint64_t pid_namespace_of(const std::string& process);

} // namespace gpustasis
