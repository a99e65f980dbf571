// SPDX-License-Identifier: Apache-2.0
/// What /proc says about a task.
#pragma once

#include "core/image_info.hpp"

#include <sys/types.h>

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpustasis::proc {

/// A whole small file. Throws Error: io naming `path`.
std::string read_file(const std::string& path);

/// What an open file holds from its position on. Throws Error: io naming `path`.
std::string read_rest(int fd, const std::string& path);

/// The task's id in its innermost pid namespace (last field of NSpid). Throws Error: io.
std::uint32_t innermost_pid(pid_t pid);

/// Field 22 of /proc/PID/stat, in clock ticks since boot. Throws Error: io.
std::uint64_t start_time(pid_t pid);

/// /proc/PID/comm without the newline. Throws Error: io.
std::string comm(pid_t pid);

/// /proc/sys/kernel/random/boot_id. Throws Error: io.
Id boot_id();

/// Whether the name of a thread of the task begins with `prefix`.
/// Throws Error: io if the task is gone.
bool has_thread_named(pid_t pid, std::string_view prefix);

/// Names of the task's threads; none if the task is gone. Throws Error: io.
std::vector<std::string> thread_names(pid_t pid);

/// Ids of the task's threads, ascending. Throws Error: io.
std::vector<pid_t> threads(pid_t pid);

enum class Liveness { dead, traced, untraced, unknown };

/// dead: no such task, one whose every thread has ended, or another task that has got the same id.
/// traced: its first thread is, or any if that one has ended. unknown: this process has too few
/// descriptors or too little memory to look now, or a thread ended while it was looked at.
Liveness liveness(pid_t pid, std::uint64_t start_time) noexcept;

/// The parent of process `pid`; 0: it has none here. Throws Error: io.
pid_t parent(pid_t pid);

/// Whether the task ended by itself: it is gone, or a zombie that no signal has killed.
bool has_exited(pid_t pid) noexcept;

/// Whether the task's first thread is about to end, and gives up what it has (PF_EXITING of linux/sched.h).
/// Throws Error: io.
bool is_exiting(pid_t pid);

/// Send SIGKILL to the task, and never to another that has got the same id.
void kill_task(pid_t pid, std::uint64_t start_time) noexcept;

/// The process that traces thread `tid`; 0: none. Throws Error: io.
pid_t tracer_of(pid_t tid);

/// A task that this process traces, as its status has it.
struct Tracee {
    pid_t pid = 0;
    std::uint32_t inner_pid = 0; ///< innermost_pid()
    char state = 0;              ///< state()
};

/// Every task that this process traces: thread-group leaders only. Of all others on the machine no file
/// is read. Throws Error: io.
std::vector<Tracee> tracees();

/// The same, sooner where the tree below `root` has few threads and all of it stands still: then no other task of the
/// machine is looked at, and one that has lost its parent meanwhile is not found. Throws Error: io.
std::vector<Tracee> tracees_below(pid_t root);

/// `root` and every process below it, parents first, as things are now: one that ends meanwhile may be
/// missing, and so are those below it. Throws nothing of the processes': none if `root` is gone.
std::vector<pid_t> tree(pid_t root);

/// The pids of tracees().
std::vector<pid_t> traced_by_us();

/// Field State of the status of thread `tid`: 'R', 'S', 'D', 'T', 't', 'Z', 'X'. Throws Error: io.
char state(pid_t tid);

/// Whether a signal that it does not block is pending for thread `tid` or its process.
/// Throws Error: io.
bool has_signal(pid_t tid);

/// What decides whose memory task `pid` may reach: its ids, capabilities, restrictions and user
/// namespace. Two tasks for which it is the same are in each other's power. Throws Error: io.
std::string rights(pid_t pid);

/// Whether thread `tid` runs under seccomp (field Seccomp of its status is not 0).
bool has_seccomp(pid_t tid);

} // namespace gpustasis::proc
