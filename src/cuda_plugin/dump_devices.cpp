// SPDX-License-Identifier: Apache-2.0
/// What of DumpSession has the driver work: in all CUDA tasks of the tree, side by side.
#include "core/error.hpp"
#include "core/process_memory.hpp"
#include "cuda_plugin/dump_session.hpp"
#include "cuda_plugin/findings.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/side_by_side.hpp"
#include "cuda_plugin/staging.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "tracee/thread_memory.hpp"

#include <algorithm>
#include <chrono>
#include <deque>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace gpustasis {
namespace {

std::string name(const TaskRecord& record) {
    return "pid " + std::to_string(record.pid);
}

} // namespace

/// A task that the driver is to checkpoint.
struct DumpSession::AtWork {
    TaskRecord* record = nullptr;
    std::vector<Mapping> before;
    std::vector<pid_t> threads;
    std::optional<ThawedThread> thawed;
};

// All are locked while all of them run: those of whom one waits for another on its GPU end their work first.
void DumpSession::lock_tree() {
    std::vector<TaskRecord*> found;
    for (const pid_t pid : proc::tree(root_))
        of_task(pid, root_, [&] {
            if (TaskRecord* record = look_at(pid))
                found.push_back(record);
        });
    reserve_arena();
    lock(found, root_);
}

// nullptr: not a CUDA task, or it has just ended.
TaskRecord* DumpSession::look_at(pid_t pid) {
    bool asked = false;
    try {
        return look_at_cuda(pid, asked);
    } catch (const Error& e) {
        // The tree still runs: a child may end while it is looked at, and CRIU goes on without it. Of
        // one that ends while the driver works in it, the driver may be the cause: that is told.
        if (asked || !proc::has_exited(pid))
            throw;
        host::info("pid " + std::to_string(pid) + " has ended: " + e.what());
        return nullptr;
    }
}

// `asked`: set once the driver has been asked to work in the task.
TaskRecord* DumpSession::look_at_cuda(pid_t pid, bool& asked) {
    if (!proc::may_use_cuda(pid)) // only what uses CUDA can lack memory
        return nullptr;
    DumpLock lock_of_dump(identify_task(pid), "criu " + std::to_string(::getpid()) +
                                                  " dumps it into " +
                                                  directory_path(image_dir_.get()));
    refuse_missing_memory(pid, false);
    const host::PausedAlarm paused;
    choose_parent_once();
    require_lock(lock_of_dump, config_.externalize); // as settled by then
    const auto tid = worker_.restore_thread(pid);
    if (!tid)
        return nullptr;
    require_answering(pid, *tid);
    asked = true;
    // Before begin(), which removes what an earlier dump has left in the directory.
    const ProcessState before = worker_.state(pid);
    if (before == ProcessState::checkpointed)
        refuse_handed_over(pid);
    if (before == ProcessState::failed)
        throw Error(Errc::io, "the driver has given the process up (state FAILED)");
    if (before != ProcessState::running && !config_.dump_locked)
        throw Error(Errc::unsupported,
                    std::string("the driver says that the process is ") +
                        (before == ProcessState::locked ? "locked" : "checkpointed") +
                        ": another program is at work on it, or has left it so; unlock it, or "
                        "set found_locked = \"dump\" to have it dumped as it is");
    begin();
    kept_staging_.prepare();
    const TaskIdentity identity = identify_task(pid);
    table_.refuse_same_image(pid, identity.inner_pid);
    locks_.push_back(std::move(lock_of_dump));
    TaskRecord& record = table_.add(pid);
    record.image_pid = identity.inner_pid;
    record.start_time = identity.start_time;
    record.pid_namespace = identity.pid_namespace;
    record.checkpoint_id = images_.manifest().checkpoint_id;
    record.restore_tid = *tid;
    record.state_before = before;
    TaskStatistics& statistics = statistics_of(record);
    if (before != ProcessState::checkpointed) {
        statistics.gpus = worker_.gpus_of(pid);
        prepare_direct(record, statistics);
        for (std::string& risk :
             take_risks(pid, images_.manifest().driver_api_version, table_->task_count,
                        statistics.gpus, !record.direct.wanted, staging_room_, config_))
            statistics_.risks.push_back(std::move(risk));
    }
    if (before == ProcessState::running)
        note_found_running(record);
    else
        host::info(name(record) + " was found locked or checkpointed and will be left so");
    if (statistics_.in_turn_because.empty() && is_of_ipc_job(pid))
        statistics_.in_turn_because =
            name(record) + " is of a job of CUDA IPC (CUDA_CHECKPOINT_JOB_FILE)";
    statistics_.parallel_gpus = tasks_at_once(config_.parallel_gpus, statistics_);
    return &record;
}

void DumpSession::lock(const std::vector<TaskRecord*>& records, pid_t asked) {
    const host::PausedAlarm paused;
    // Not bounded by the number of GPUs: one may wait for another.
    constexpr std::size_t kMost = 256;
    side_by_side(
        worker_, records.size(),
        {.limit = statistics_.in_turn_because.empty() ? kMost : 1, .memory = {}, .room = {}},
        [&](std::size_t i) -> std::optional<Worker::Call> {
            TaskRecord& record = *records[i];
            // It may have ended while the others were looked at, or be about to.
            if (record.state_before != ProcessState::running ||
                !has_thread(record.pid, record.restore_tid) ||
                proc::liveness(record.pid, record.start_time) == proc::Liveness::dead)
                return std::nullopt;
            record.lock_begun = true;
            return worker_.begin_lock(record.pid, config_.lock_timeout_ms);
        },
        [&](const CallsUnderWay::Answer& answer) {
            TaskRecord& record = *records[answer.number];
            statistics_of(record).phases.add("lock", answer.waited);
            of_task(record.pid, asked, [&] {
                if (answer.error)
                    std::rethrow_exception(answer.error);
                if (worker_.state(record.pid) != ProcessState::locked)
                    throw Error(Errc::io, "the driver says it locked the process, and that it is "
                                          "not locked");
            });
            host::info("locked " + name(record));
        });
}

// On return nothing of the tree runs any more, but for tasks that have ended or are not criu's.
void DumpSession::checkpoint_tree(pid_t asked) {
    if (std::exchange(checkpointed_, true))
        return;
    // Parents first: what a child has inherited is known then.
    for (const pid_t pid : proc::tree(root_))
        if (is_traced_by_us(pid))
            of_task(pid, asked, [&] {
                close_left(pid);
                const TaskRecord* record = table_.find(pid);
                if (table_->task_count != 0 &&
                    (record == nullptr || !has_thread(pid, record->restore_tid)))
                    inherited_.look_at(pid, *table_);
            });
    std::deque<AtWork> tasks; // in their places until the last is frozen again
    for (std::size_t i = 0; i < table_->task_count; ++i) {
        TaskRecord& record = table_->tasks[i];
        if (!is_traced_by_us(record.restore_tid))
            continue;
        of_task(record.pid, asked, [&] {
            close_left(record.pid);
            if (record.state_before != ProcessState::checkpointed) {
                tasks.emplace_back().record = &record;
                return;
            }
            refuse_missing_memory(record.pid, false); // another dump may have dropped it meanwhile
            refuse_handed_over(record.pid);
            require_checkpointed(record);
            note({{entry_of(record), record.pid}});
            staging_[record.pid] = {};
        });
    }
    std::vector<ToStage> to_stage;
    to_stage.reserve(tasks.size());
    for (const AtWork& task : tasks)
        to_stage.emplace_back(
            task.record->pid,
            task.record->direct.wanted ? 0 : statistics_of(*task.record).gpus.known_size());
    kept_staging_.choose(to_stage);
    side_by_side(
        worker_, tasks.size(),
        {.limit = statistics_.parallel_gpus,
         .memory =
             [&](std::size_t i) {
                 const std::optional<std::uint64_t> bytes = to_stage[i].second;
                 return bytes ? std::optional(with_margin(*bytes)) : std::nullopt;
             },
         .room = [&](std::size_t i) { return room_of(tasks[i].record->pid); }},
        [&](std::size_t i) -> std::optional<Worker::Call> {
            const pid_t pid = tasks[i].record->pid;
            if (!of_task(pid, asked, [&] { return kept_staging_.has_room(to_stage[i]); }))
                drop_kept(asked);
            return of_task(pid, asked, [&] { return begin_checkpoint(tasks[i]); });
        },
        [&](const CallsUnderWay::Answer& answer) {
            AtWork& task = tasks[answer.number];
            add_times(*task.record, answer.waited);
            of_task(task.record->pid, asked, [&] {
                if (answer.error)
                    std::rethrow_exception(answer.error);
                end_checkpoint(task);
            });
        });
}

// Once of each task.
void DumpSession::close_left(pid_t pid) {
    TaskRecord* record = table_.find(pid);
    if (record != nullptr && !has_thread(pid, record->restore_tid))
        record = nullptr; // another task has its pid
    if (looked_at_.insert(pid).second)
        close_left_userfaultfd(pid, record, closed_);
}

// Whoever has left it so may have come back for it before it was frozen.
void DumpSession::require_checkpointed(TaskRecord& record) {
    give_own_signals(record);
    ThawedThread thawed(record);
    const WatchedThread watched(worker_, record.restore_tid);
    const ProcessState state = worker_.state(record.pid);
    thawed.refreeze();
    if (state != ProcessState::checkpointed)
        throw Error(Errc::io, "another program has restored the process meanwhile; try again");
    inherited_.require_none_left(record.pid);
}

Worker::Call DumpSession::begin_checkpoint(AtWork& task) {
    TaskRecord& record = *task.record;
    task.before = read_maps(record.pid);
    task.threads = proc::threads(record.pid);
    if (record.direct.wanted)
        images_.leave(record);
    record.checkpoint_begun = true;
    record.direct.begun = record.direct.wanted;
    record_checkpoint(record, place(), config_.externalize);
    task.thawed.emplace(record);
    if (record.direct.begun)
        return worker_.begin_checkpoint_direct(record, record.restore_tid);
    return worker_.begin_checkpoint(record.pid, record.restore_tid);
}

// While the driver may still be at work in others: the memory of this one is stored, and taken from it or hidden.
void DumpSession::end_checkpoint(AtWork& task) {
    TaskRecord& record = *task.record;
    TaskStatistics& statistics = statistics_of(record);
    {
        const WatchedThread watched(worker_, record.restore_tid);
        if (worker_.state(record.pid) != ProcessState::checkpointed)
            throw Error(Errc::io, "the driver says it checkpointed the process, and that it is not "
                                  "checkpointed");
    }
    proc::wait_for_helper_threads(record.pid, task.threads);
    if (task.thawed) // since its call was begun
        task.thawed->refreeze();
    inherited_.require_none_left(record.pid);
    std::vector<Region> regions;
    if (record.direct.begun)
        take_direct(record, statistics);
    else if (config_.externalize || cpu_memory_.is_on())
        regions = statistics.phases.time("find_staging", [&] {
            return find_staging(task.before, read_maps(record.pid), addresses_in_use(record.pid));
        });
    if (!record.direct.begun && (regions.empty() || !config_.externalize))
        note({{entry_of(record), record.pid}});
    else if (!record.direct.begun)
        externalize(record, regions, statistics);
    host::info("checkpointed " + name(record) + ": " +
               std::to_string(statistics.staged_bytes >> 20) + " MiB of GPU memory, " +
               std::to_string(statistics.file_bytes >> 20) + " MiB stored");
    staging_[record.pid] = std::move(regions);
}

void DumpSession::externalize(TaskRecord& record, const std::vector<Region>& regions,
                              TaskStatistics& statistics) {
    const bool keeps = kept_staging_.keeps(regions);
    ManifestTask task = entry_of(record);
    ProcessMemory memory(record.pid);
    const WriteResult written = statistics.phases.time(
        "write", [&] { return images_.write(record.pid, task, regions, memory); });
    statistics.gpu_memory = "staged";
    statistics.externalized = true;
    statistics.regions = regions.size();
    statistics.totals = written.totals;
    statistics.file_bytes = written.file_size;
    statistics.damaged_in_parent = written.damaged_in_parent;
    for (const Region& region : regions)
        statistics.staged_bytes += region.length;
    note({{std::move(task), record.pid}});
    record.digest = written.digest;
    if (keeps) {
        kept_staging_.hide(record.pid, regions);
        statistics.staging = "kept";
    } else {
        drop(record, regions, statistics);
    }
}

void DumpSession::drop(TaskRecord& record, const std::vector<Region>& regions,
                       TaskStatistics& statistics) {
    Guard& guard = guards_[record.pid];
    statistics.phases.time("drop", [&] {
        drop_staging(guard, record, regions, *table_, undo_images_, place(), config_.threads,
                     config_.require_guard);
    });
    statistics.staging = "dropped";
    statistics.not_guarded_because = guard.why_not;
}

// Their images hold it, and criu is not told of it any more than before.
void DumpSession::drop_kept(pid_t asked) {
    for (std::size_t i = 0; i < table_->task_count; ++i) {
        TaskRecord& record = table_->tasks[i];
        TaskStatistics& statistics = statistics_of(record);
        if (statistics.staging == "kept")
            of_task(record.pid, asked, [&] { drop(record, staging_[record.pid], statistics); });
    }
}

ManifestTask DumpSession::entry_of(const TaskRecord& record) {
    const ProcessGpus& seen = statistics_of(record).gpus;
    ManifestTask task;
    task.pid = record.image_pid;
    task.state_before = record.state_before;
    task.gpus = places_of(seen, images_.manifest().gpus);
    task.gpu_source = task.gpus.empty() ? GpuSource::unknown : seen.source;
    return task;
}

} // namespace gpustasis
