// SPDX-License-Identifier: Apache-2.0
#include "tracee/task_identity.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace gpustasis {

std::uint64_t pid_namespace_of(const std::string& process) {
    const std::string path = "/proc/" + process + "/ns/pid";
    struct stat status {};
    if (::stat(path.c_str(), &status) != 0)
        throw io_error("cannot examine " + path, errno);
    return status.st_ino;
}

TaskIdentity identify_task(pid_t pid) {
    return {pid_namespace_of(std::to_string(pid)), proc::innermost_pid(pid), proc::start_time(pid)};
}

std::string run_directory(uid_t user) {
    return user == 0 ? "/run" : "/run/user/" + std::to_string(user);
}

std::string run_directory() {
    return run_directory(::geteuid());
}

std::string file_name(const TaskIdentity& task) {
    return std::to_string(task.pid_namespace) + "-" + std::to_string(task.inner_pid) + "-" +
           std::to_string(task.start_time);
}

std::optional<TaskIdentity> task_of_file(const char* name) {
    TaskIdentity task;
    char rest = 0;
    unsigned long long pid_namespace = 0;
    unsigned long long start_time = 0;
    if (std::sscanf(name, "%llu-%u-%llu%c", &pid_namespace, &task.inner_pid, &start_time, &rest) !=
        3)
        return std::nullopt;
    task.pid_namespace = pid_namespace;
    task.start_time = start_time;
    return task;
}

} // namespace gpustasis
