// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/undo.hpp"

#include "core/image_reader.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <exception>
#include <optional>

namespace gpustasis {
namespace {

/// Unlock, believing the state and not the answer: a driver may report an error and have done it, or
/// success and not have done it.
void unlock(pid_t pid, Driver& driver) {
    try {
        driver.unlock(pid);
    } catch (const DriverError&) {
        if (driver.state(pid) != ProcessState::running)
            throw;
        return;
    }
    if (driver.state(pid) != ProcessState::running)
        throw Error(Errc::io,
                    "the driver says it unlocked the process, and that it is not running");
}

} // namespace

DroppedTask dropped_task(const TaskRecord& record) {
    return {.pid = record.pid,
            .start_time = record.start_time,
            .checkpoint_id = record.checkpoint_id,
            .digest = record.digest,
            .image = image_name(record.image_pid)};
}

void refill_task(TaskRecord& record, const UndoImages& images, unsigned threads,
                 MissingPages* pages) {
    if (record.drop_begun && !record.refilled) {
        const ImageReader image = images.open(dropped_task(record));
        // Still guarded meanwhile: should this process be killed, the guardians go on.
        if (pages != nullptr)
            pages->fill(image, threads);
        else
            refill_dropped(record.pid, image, threads);
        record.refilled = true;
        if (pages != nullptr)
            pages->release();
    }
    // Before the driver restores: from then on the staged memory is the driver's to give back.
    forget_drop(record);
}

void undo_task(const TaskRecord& record, Driver& driver) {
    undo_restore(record, driver);
    undo_unlock(record, driver);
}

void undo_restore(const TaskRecord& record, Driver& driver) {
    if (record.direct.begun) {
        driver.restore_direct(record);
        // Its owner may have unlocked it meanwhile.
        if (record.state_before == ProcessState::locked)
            if (const ProcessState now = driver.state(record.pid);
                now != ProcessState::locked && now != ProcessState::running)
                throw Error(Errc::io,
                            "the driver says it restored the process, and that it is not");
        return;
    }
    const ProcessState state = driver.state(record.pid);
    if (state == ProcessState::failed)
        throw Error(Errc::io, "the driver has given the process up (state FAILED)");
    // Only what this dump has begun: another one may be at work on the task.
    if (record.checkpoint_begun && state == ProcessState::checkpointed &&
        record.state_before != ProcessState::checkpointed) {
        driver.initialize();
        driver.restore(record.pid, {});
        if (record.state_before == ProcessState::locked &&
            driver.state(record.pid) != ProcessState::locked)
            throw Error(Errc::io, "the driver says it restored the process, and that it is not");
    }
}

void undo_unlock(const TaskRecord& record, Driver& driver) {
    // Also if it is checkpointed still: then the driver refuses, and that is told.
    if (record.lock_begun && record.state_before == ProcessState::running &&
        driver.state(record.pid) != ProcessState::running)
        unlock(record.pid, driver);
}

void forget_drop(TaskRecord& record) noexcept {
    if (!record.recorded)
        return;
    try {
        DropRecords().remove(identity_of(record));
        record.recorded = false;
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): see undo.hpp
    }
}

void forget_checkpoint(const TaskRecord& record) noexcept {
    try {
        DropRecords records({}, DropRecords::kCheckpointed);
        const std::optional<DropRecord> found = records.find(identity_of(record));
        if (found && found->checkpoint_id == record.checkpoint_id)
            records.remove(found->task);
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): see undo.hpp
    }
}

void reset_signal_mask(TaskRecord& record) {
    if (!record.thawed)
        return;
    const pid_t tid = record.restore_tid;
    ptrace_call(PTRACE_SEIZE, "PTRACE_SEIZE", tid, nullptr, nullptr);
    struct Detach {
        pid_t tid;
        ~Detach() { ::ptrace(PTRACE_DETACH, tid, nullptr, nullptr); }
    } const detach{tid};
    ptrace_call(PTRACE_INTERRUPT, "PTRACE_INTERRUPT", tid, nullptr, nullptr);
    if (!wait_for_event_stop(tid, ThawedThread::kPatience))
        throw Error(Errc::io, "thread " + std::to_string(tid) +
                                  " hangs in the kernel: its signals "
                                  "stay blocked");
    set_signal_mask(tid, record.signal_mask);
    record.thawed = false;
}

bool is_stopped(pid_t tid) noexcept {
    try {
        const char state = tid == 0 ? 'S' : proc::state(tid);
        return state == 'T' || state == 't';
    } catch (const std::exception&) {
        return false;
    }
}

bool is_free(const TaskRecord& record) noexcept {
    return proc::liveness(record.pid, record.start_time) == proc::Liveness::untraced;
}

} // namespace gpustasis
