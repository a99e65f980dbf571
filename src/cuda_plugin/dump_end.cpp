// SPDX-License-Identifier: Apache-2.0
/// How a dump ends: what of DumpSession signs it, brings the tasks back, and says that it failed.
#include "core/error.hpp"
#include "cuda_plugin/dump_session.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "cuda_plugin/traced_thread.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "tracee/thread_memory.hpp"

#include <unistd.h>

#include <cstdlib>
#include <exception>
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
    } catch (const Error&) {
        images_.withdraw();
        throw;
    }
}

// Where that was not noticed before: criu has written all of its images, and the tasks are still as it has frozen them.
void DumpSession::sign_directory() {
    if (!signature_ || signature_->is_signed())
        return;
    try {
        statistics_.phases.time("sign", [&] { signature_->sign(); });
    } catch (const std::exception& e) {
        refuse(e.what());
    }
}

void DumpSession::undo(TaskRecord& record) noexcept {
    try {
        if (proc::liveness(record.pid, record.start_time) == proc::Liveness::dead) {
            forget_drop(record);
            forget_checkpoint(record);
            record.settled = true;
            return;
        }
        TaskStatistics& statistics = statistics_of(record);
        host::info("bringing back " + name(record));
        statistics.phases.time("undo", [&] {
            // While every thread of it is frozen: none may see the memory missing.
            Guard& guard = guards_[record.pid];
            refill_task(record, undo_images_, config_.threads,
                        guard.pages ? &*guard.pages : nullptr);
            // Frozen only if the dump came that far: a failing lock leaves the task running.
            if (is_traced_by_us(record.restore_tid)) {
                ThawedThread thawed(record);
                const WatchedThread watched(worker_, record.restore_tid);
                undo_task(record, worker_);
                thawed.refreeze();
            } else {
                undo_task(record, worker_);
            }
        });
        record.settled = true;
        host::info("brought back " + name(record));
    } catch (const std::exception& e) {
        host::error(name(record) + " is left as it is, its GPU work may hang: " + e.what() +
                    "; the driver worker tries again when criu is gone, then try gpustasis "
                    "recover " +
                    std::to_string(record.pid));
        statistics_.result = "failed";
        statistics_.error = e.what();
    }
}

// The end of a dump that criu takes for a good one, and that is none: nobody may think that it is.
void DumpSession::refuse(const char* why) noexcept {
    host::error(std::string(why) + ": Dumping FAILED, and the tasks run on");
    finish(false);
    images_.withdraw();
    if (host::final_state() == criu::FinalState::dead) // else criu has done so
        host::undo_dump_of_criu();
    ::_exit(EXIT_FAILURE);
}

void DumpSession::finish(bool succeeded) noexcept {
    try {
        if (packed_ && !packed_->end(succeeded))
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
            sign_directory();
        else if (signature_)
            signature_->withdraw();
        cpu_memory_.finish(succeeded);
        if (!begun_ && statistics_.cpu_memory.empty() && !packed_) {
            worker_.stop();
            return;
        }
        if (!succeeded)
            statistics_.result = "failed";
        const bool killed = succeeded && host::final_state() == criu::FinalState::dead;
        bool settled = true;
        if (!killed) {
            for (std::size_t i = 0; i < table_->task_count; ++i) {
                undo(table_->tasks[i]);
                settled = settled && table_->tasks[i].settled;
            }
        }
        if (begun_ && (killed || !settled)) {
            table_->left = true;
            worker_.leave();
        } else
            worker_.stop();
        if (succeeded && images_.named_ours())
            container_.keep(image_dir_.get(), images_.manifest().checkpoint_id, statistics_);
        write_statistics(image_dir_.get(), statistics_);
        if (killed)
            container_.mark_checkpointed();
    } catch (const std::exception& e) {
        host::warn(std::string("at the end of the dump: ") + e.what());
    }
}

} // namespace gpustasis
