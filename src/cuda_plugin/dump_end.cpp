// SPDX-License-Identifier: Apache-2.0
/// How a dump ends: what of DumpSession signs it, brings the tasks back, and says that it failed.
#include "core/error.hpp"
#include "cuda_plugin/device_files.hpp"
#include "cuda_plugin/dump_session.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/other_ways.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/side_by_side.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "tracee/thread_memory.hpp"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <deque>
#include <exception>
#include <optional>
#include <string>

namespace gpustasis {
namespace {

std::string name(const TaskRecord& record) {
    return "pid " + std::to_string(record.pid);
}

} // namespace

// While criu can still let the dump fail. What is not signed is no checkpoint: whoever believes signatures would
// refuse it, when it may be all that is left of the job.
void DumpSession::sign_images() {
    if (!signature_)
        return;
    try {
        statistics_.phases.time("sign", [&] { signature_->sign(); });
    } catch (const std::exception&) {
        images_.withdraw();
        throw;
    }
}

// Where that was not noticed before: criu has written all of its images, and the tasks are still as it has frozen them.
void DumpSession::complete_directory() {
    try {
        images_.publish();
        if (signature_ && !signature_->is_signed())
            statistics_.phases.time("sign", [&] { signature_->sign(); });
    } catch (const std::exception& e) {
        refuse(e.what());
    }
}

// What was begun with a task that has ended: nothing is left to undo.
void DumpSession::settle_dead(TaskRecord& record) noexcept {
    forget_drop(record);
    forget_checkpoint(record);
    record.settled = true;
}

void DumpSession::tell_left(const TaskRecord& record, const char* why) noexcept {
    host::error(name(record) + " is left as it is, its GPU work may hang: " + why +
                "; the driver worker tries again when criu is gone, then try gpustasis "
                "recover " +
                std::to_string(record.pid));
    statistics_.result = "failed";
    statistics_.error = why;
}

// Bytes that are to be put back into it.
std::uint64_t DumpSession::missing_in(const TaskRecord& record) {
    return record.drop_begun && !record.refilled ? statistics_of(record).staged_bytes : 0;
}

// While every thread of the task is frozen: none may see the memory missing.
void DumpSession::refill(TaskRecord& record) {
    Guard& guard = guards_[record.pid];
    refill_task(record, undo_images_, config_.threads, guard.pages ? &*guard.pages : nullptr);
}

/// Before the restore thread of a task gets another signal mask. (One that was found checkpointed has no record: it
/// would say that its memory is there.)
void DumpSession::record_before_thaw(const TaskRecord& record) {
    if (!record.checkpoint_begun && record.state_before != ProcessState::checkpointed)
        record_checkpoint(record, place(), false);
}

/// A task that is brought back.
struct DumpSession::GoingBack {
    TaskRecord* record = nullptr;
    std::optional<ThawedThread> thawed; ///< if the dump came so far that it is frozen
    std::optional<std::vector<int>>
        devices_before;  ///< its descriptors of the driver's, while checkpointed
    bool failed = false; ///< and that was told
    bool restored = false;
};

// All tasks are restored before any is unlocked. While the driver restores one, memory is put back into the next.
void DumpSession::undo_tree() noexcept {
    std::deque<GoingBack> tasks;
    try {
        for (std::size_t i = 0; i < table_->task_count; ++i) {
            TaskRecord& record = table_->tasks[i];
            const bool is_dead =
                proc::liveness(record.pid, record.start_time) == proc::Liveness::dead;
            // One that has executed another program has no CUDA state any more. Once it is frozen it cannot.
            const bool is_another =
                !record.checkpoint_begun && !has_thread(record.pid, record.restore_tid);
            if (is_another && !is_dead)
                host::warn(name(record) +
                           " has no restore thread any more: it has executed another "
                           "program, or its GPU work may hang");
            if (is_another || is_dead)
                settle_dead(record);
            else
                tasks.emplace_back().record = &record;
        }
        // Memory may be put back for long, and this process die meanwhile: there has to be one that goes on.
        if (!tasks.empty())
            worker_.be_there();
        const auto fail = [&](GoingBack& task, const std::exception_ptr& error) {
            task.failed = true;
            try {
                std::rethrow_exception(error);
            } catch (const std::exception& e) {
                tell_left(*task.record, e.what());
            }
        };
        // One that cannot be brought back keeps no other from it. What was lost with the worker because of another is
        // tried once more, below, and so is what waited behind the task's own checkpoint, which hung in that worker.
        const auto step = [&](auto&& begin, auto&& done) {
            side_by_side(
                worker_, tasks.size(),
                {.limit = statistics_.parallel_gpus,
                 .memory = [&](std::size_t i) { return missing_in(*tasks[i].record); },
                 .room = [&](std::size_t i) { return room_of(tasks[i].record->pid); }},
                [&](std::size_t i) -> std::optional<Worker::Call> {
                    GoingBack& task = tasks[i];
                    try {
                        return begin(task);
                    } catch (const std::exception&) {
                        if (worker_.is_there()) // else it was that: one more try, below
                            fail(task, std::current_exception());
                        return std::nullopt;
                    }
                },
                [&](const CallsUnderWay::Answer& answer) {
                    GoingBack& task = tasks[answer.number];
                    // Of direct memory most of it is ours: the worker reads the image meanwhile.
                    statistics_of(*task.record)
                        .phases.add(task.record->direct.begun ? "undo" : "driver_undo",
                                    answer.waited);
                    try {
                        if (!answer.error)
                            done(task);
                        else if (!answer.lost && !(task.record->direct.begun && worker_.is_gone()))
                            fail(task, answer.error);
                    } catch (const std::exception&) {
                        fail(task, std::current_exception());
                    }
                });
        };
        step(
            [&](GoingBack& task) -> std::optional<Worker::Call> {
                TaskRecord& record = *task.record;
                host::info("bringing back " + name(record));
                statistics_of(record).phases.time("undo", [&] { refill(record); });
                const bool is_frozen = is_traced_by_us(record.restore_tid);
                if (is_frozen) {
                    record_before_thaw(record);
                    task.devices_before = driver_descriptors(record.pid);
                    task.thawed.emplace(record);
                }
                const WatchedThread watched(worker_, is_frozen ? record.restore_tid : 0);
                // Quick, where there is nothing to restore.
                task.restored =
                    !record.checkpoint_begun ||
                    (!record.direct.begun && worker_.state(record.pid) == ProcessState::running);
                if (task.restored)
                    return std::nullopt;
                return worker_.begin_undo_restore(record, is_frozen ? record.restore_tid : 0);
            },
            [](GoingBack& task) { task.restored = true; });
        step(
            [&](GoingBack& task) -> std::optional<Worker::Call> {
                if (!task.restored)
                    return std::nullopt;
                return worker_.begin_undo_unlock(*task.record,
                                                 task.thawed ? task.record->restore_tid : 0);
            },
            [&](GoingBack& task) {
                if (task.thawed) {
                    task.thawed->refreeze();
                    if (task.record->checkpoint_begun)
                        close_on_exec(*task.record, task.devices_before);
                }
                forget_checkpoint(*task.record);
                task.record->settled = true;
                host::info("brought back " + name(*task.record));
            });
    } catch (const std::exception& e) {
        host::warn(std::string("tasks are not brought back side by side: ") + e.what());
    }
    for (GoingBack& task : tasks) {
        task.thawed.reset();
        if (!task.record->settled && !task.failed)
            undo(*task.record);
    }
}

void DumpSession::undo(TaskRecord& record) noexcept {
    try {
        host::info("bringing back " + name(record));
        statistics_of(record).phases.time("undo", [&] {
            refill(record);
            // Frozen only if the dump came that far: a failing lock leaves the task running.
            if (is_traced_by_us(record.restore_tid)) {
                record_before_thaw(record);
                const auto before = driver_descriptors(record.pid);
                ThawedThread thawed(record);
                const WatchedThread watched(worker_, record.restore_tid);
                undo_task(record, worker_);
                thawed.refreeze();
                if (record.checkpoint_begun)
                    close_on_exec(record, before);
            } else {
                undo_task(record, worker_);
            }
            forget_checkpoint(record);
        });
        record.settled = true;
        host::info("brought back " + name(record));
    } catch (const std::exception& e) {
        tell_left(record, e.what());
    }
}

// The end of a dump that criu takes for a good one, and that is none: nobody may think that it is.
void DumpSession::refuse(const char* why) noexcept {
    host::error(std::string(why) + ": Dumping FAILED, and the tasks run on");
    is_refused_ = true;
    finish(false);
    images_.withdraw();
    if (host::final_state() == criu::FinalState::dead) // else criu has done so
        host::undo_dump_of_criu();
    ::_exit(EXIT_FAILURE);
}

// What is no checkpoint takes memory that the next may need. As long as a task may need it for its undo, it stays.
void DumpSession::end_arena(bool succeeded, bool settled) noexcept {
    const bool is_checkpoint = succeeded && !images_.manifest().tasks.empty();
    if (arena_ && is_checkpoint)
        arena_->complete();
    if (!arena_ || is_checkpoint || !settled)
        return;
    arena_->remove();
    statistics_.arena_directory.clear();
}

// Of a dump that criu says has failed: whether a script was shown a checkpoint before. Then it stays: criu 4.3 counts a
// script that fails as its own failure (older ones do not), and whoever runs the script may have committed the checkpoint
// before it was killed. Not in an arena: memory is scarce, and who commits what is there has a copy elsewhere. Nor where
// pages went elsewhere, which may not have arrived, or where the dump would have been refused had it succeeded.
bool DumpSession::was_shown_whole() const noexcept {
    const bool is_packed = packed_ && packed_->is_done();
    if (is_refused_ || arena_ || sent_pages_ || !(is_whole_ || is_packed) ||
        !images_.is_as_asked() || !images_.is_finished() || (!config_.sign.empty() && !signature_))
        return false;
    try {
        if (!is_packed) // else that was looked at before it was packed
            require_all_pages(image_dir_.get(), names_in(image_dir_.get()), InParent::there);
        return true;
    } catch (const std::exception&) {
        return false;
    }
}

void DumpSession::finish(bool succeeded) noexcept {
    const bool was_shown = !succeeded && was_shown_whole();
    try {
        if (packed_ && !packed_->end(succeeded || was_shown))
            refuse("layout = \"packed\": criu has ended its dump, and has an image still open for "
                   "writing, or wrote none here");
        if (succeeded && !images_.is_as_asked())
            refuse("layout or recipients: criu has not asked this plugin about any task before it "
                   "froze the "
                   "tree, and has written its images in the clear: remove them");
        if (succeeded && !images_.is_finished())
            refuse("recipients: criu has ended its dump, and has not asked about every task");
        if (succeeded && !config_.sign.empty() && !signature_)
            refuse("sign: criu has not asked this plugin about any task before it froze the tree: "
                   "what it has written is not signed");
        if (succeeded)
            complete_directory();
        else if (signature_ && !was_shown)
            signature_->withdraw();
        // Without `complete_` it got its name before criu was done, and nothing tells what a script was shown.
        if (!succeeded && images_.is_published() && complete_ && !was_shown)
            images_.withdraw();
        cpu_memory_.finish(succeeded);
        kept_staging_.finish(succeeded);
        hidden_pages_.reset();
        if (!begun_ && statistics_.cpu_memory.empty() && !packed_) {
            worker_.stop();
            end_arena(succeeded, true);
            return;
        }
        if (!succeeded)
            statistics_.result = "failed";
        const bool killed = succeeded && host::final_state() == criu::FinalState::dead;
        bool settled = true;
        if (!killed) {
            undo_tree();
            for (std::size_t i = 0; i < table_->task_count; ++i)
                settled = settled && table_->tasks[i].settled;
        }
        if (begun_ && (killed || !settled)) {
            table_->left = true;
            worker_.leave();
        } else
            worker_.stop();
        if (succeeded && images_.named_ours())
            container_.keep(image_dir_.get(), images_.manifest().checkpoint_id, statistics_);
        end_arena(succeeded, settled);
        write_statistics(image_dir_.get(), statistics_);
        if (killed)
            container_.mark_checkpointed();
    } catch (const std::exception& e) {
        host::warn(std::string("at the end of the dump: ") + e.what());
    }
}

} // namespace gpustasis
