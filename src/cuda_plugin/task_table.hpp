// SPDX-License-Identifier: Apache-2.0
/// What has been done to each task, in memory that criu and the worker share: if criu dies, the
/// worker reads here what there is to undo.
#pragma once

#include "core/chunk_codec.hpp"
#include "core/image_info.hpp"
#include "device_memory/device_copy.hpp"
#include "dropped_memory/drop_record.hpp"
#include "seal/sealed_format.hpp"

#include <sys/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace gpustasis {

/// GPU memory of a task that the driver hands over to the worker, and what became of it (direct_work.hpp).
struct DirectRecord {
    bool wanted = false; ///< by criu, while the task runs
    /// Set by criu before the worker is asked: the driver stages nothing in the task, and takes it back the same way
    /// alone.
    std::atomic<bool> begun = false;
    /// By criu, of a sealed dump: the number of the sealed file that is left to the worker, which takes it, once (0).
    std::atomic<std::uint32_t> left_file = 0;
    /// By the worker: the task lacks memory that is being copied into it. A worker that dies then leaves it so, whatever the
    /// driver says of the task.
    mutable std::atomic<bool> filling = false;
    /// By the worker: it is in the driver's call that takes memory back, which may be handed to it at any moment. Then it is
    /// `held`.
    mutable std::atomic<bool> restoring = false;
    /// By the worker: it is in the driver's call that hands memory over, since `moved_at`. Then it is `held`.
    mutable std::atomic<bool> asking = false;
    /// By criu, while it decides whether to kill the worker: neither of these two calls is begun meanwhile.
    mutable std::atomic<bool> ending = false;
    /// By the worker: it waits for the driver to complete an operation, and copies nothing.
    mutable std::atomic<bool> completing = false;
    /// By the worker, as soon as it is so: the memory is nowhere but on GPUs or in memory that this one process has, or the
    /// driver waits for it to put memory back. Who ends the worker then ends the task.
    mutable std::atomic<bool> held = false;
    /// The rest by the worker. `stored`: the image is complete and durable, with TaskRecord::digest.
    std::atomic<bool> stored = false;
    mutable MovedAt moved_at = 0;       ///< when memory was last copied
    std::uint64_t most = 0;             ///< bytes of an image at most, by criu
    std::uint64_t image_start_time = 0; ///< of a restore: the one that the image has, by criu
    static constexpr std::size_t kMaxGpus = 64;
    std::uint32_t gpu_count = 0;
    std::uint32_t numbers[kMaxGpus]{}; ///< among the GPUs of the image
    std::uint64_t sizes[kMaxGpus]{};   ///< bytes
    DeviceSizes device_sizes() const {
        DeviceSizes found;
        for (std::uint32_t i = 0; i < gpu_count; ++i)
            found.emplace_back(numbers[i], sizes[i]);
        return found;
    }
    EncodingTotals totals;
    std::uint64_t file_size = 0;
    std::int64_t room_taken = 0; ///< bytes of an arena's room, less what was given to it
    std::uint64_t damaged_in_parent = 0;
    char first_damage[512]{};
    std::uint64_t driver_ns = 0; ///< of the driver's calls alone
    seal::OtherFile sealed;      ///< the file that was left to it; set before `stored`
    bool room_was_reserved = false;
};

/// Written by criu before it does what the record says, so that a record never says too little.
struct TaskRecord {
    pid_t pid = 0;                ///< as criu sees it
    std::uint32_t image_pid = 0;  ///< in the task's innermost pid namespace; names its image
    std::uint64_t start_time = 0; ///< field 22 of /proc/PID/stat: the pid is still this task
    pid_t restore_tid = 0;
    ProcessState state_before = ProcessState::running;
    std::uint64_t pid_namespace = 0; ///< of the task: with image_pid and start_time its identity
    Id checkpoint_id{};              ///< of this dump
    Id digest{};                     ///< of its image; set before drop_begun
    std::atomic<bool> lock_begun = false;
    std::atomic<bool> checkpoint_begun = false;
    std::atomic<bool> recorded = false;         ///< there may be a record of the drop
    std::atomic<bool> drop_begun = false;       ///< staged pages may be gone: the image has them
    std::atomic<bool> refilled = false;         ///< all of them are back
    std::atomic<bool> gone = false;             ///< the task runs another program, without them
    static constexpr int kGuardians = 2;        ///< the guardian and its spare
    std::atomic<pid_t> guardians[kGuardians]{}; ///< as criu sees them; 0: not started yet
    std::atomic<std::uint64_t> guardian_starts[kGuardians]{}; ///< as start_time; set before the pid
    std::atomic<bool> guarded = false;                        ///< all were started (guardian.hpp)
    std::atomic<bool> refill_failed = false;    ///< a guardian cannot put the pages back
    char refill_error[1024]{};                  ///< why; set before refill_failed
    std::atomic<bool> thawed = false;           ///< the restore thread runs with signals blocked
    std::atomic<std::uint64_t> signal_mask = 0; ///< the restore thread's own, while thawed
    std::atomic<bool> settled = false;          ///< nothing is left to undo
    DirectRecord direct;
};

/// As records of dropped memory name the task.
inline TaskIdentity identity_of(const TaskRecord& record) noexcept {
    return {record.pid_namespace, record.image_pid, record.start_time};
}

/// What the worker does with the tasks once criu is gone without having said goodbye.
enum class OnOrphaned : std::uint32_t {
    undo, ///< a dump: bring every task back that is alive and no longer traced
    kill, ///< a restore: kill what was made, it is not complete
};

/// A task that a restore has made. The start time tells it from another that has got its pid.
struct RestoredTask {
    pid_t pid = 0;
    std::uint64_t start_time = 0; ///< as in TaskRecord
};

/// Lives in a MAP_SHARED mapping; entries are appended and never removed.
struct TaskTable {
    static constexpr std::size_t kMaxTasks = 4096;  ///< CUDA tasks in one tree
    static constexpr std::size_t kMaxKills = 65536; ///< tasks of a restored tree

    OnOrphaned on_orphaned = OnOrphaned::undo;
    std::atomic<bool> left = false; ///< criu has left the tasks: to their end, as far as it knows
    std::atomic<std::size_t> task_count = 0;
    TaskRecord tasks[kMaxTasks];
    std::atomic<std::size_t> kill_count = 0;
    RestoredTask kills[kMaxKills];
    std::atomic<bool> complete = false; ///< the restored tree may run: nothing is to be killed
};

/// Owns the shared mapping.
class SharedTaskTable {
public:
    /// Throws Error: io.
    explicit SharedTaskTable(OnOrphaned on_orphaned);
    SharedTaskTable(const SharedTaskTable&) = delete;
    SharedTaskTable& operator=(const SharedTaskTable&) = delete;
    ~SharedTaskTable();

    TaskTable& operator*() noexcept { return *table_; }
    TaskTable* operator->() noexcept { return table_; }

    /// A new record for `pid`. Throws Error: unsupported if the table is full.
    TaskRecord& add(pid_t pid);
    /// Throws Error: unsupported if a task in the table has an image of the name that `pid` would have, whose place
    /// that one would take.
    void refuse_same_image(pid_t pid, std::uint32_t image_pid) const;
    /// nullptr if `pid` has none.
    TaskRecord* find(pid_t pid) noexcept;

private:
    TaskTable* table_;
};

} // namespace gpustasis
