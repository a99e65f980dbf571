#include "cuda_plugin/undo.hpp"

#include "core/image_reader.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/staging.hpp"
#include "cuda_plugin/thawed_thread.hpp"
#include "tracee/ptrace_call.hpp"
#include "tracee/ptrace_stop.hpp"

namespace gpustasis {
namespace {

/// Unlock, believing the state and not the answer: a driver may report an error and have done it.
void unlock(pid_t pid, Driver& driver) {
    try {
        driver.unlock(pid);
    } catch (const DriverError&) {
        if (driver.state(pid) != ProcessState::running)
            throw;
    }
}

} // namespace

void undo_task(const TaskRecord& record, Driver& driver, Lineage& lineage, unsigned threads) {
    ProcessState state = driver.state(record.pid);
    if (state == ProcessState::failed)
        throw Error(Errc::io, "the driver has given the process up (state FAILED)");
    if (state == ProcessState::checkpointed && record.state_before != ProcessState::checkpointed) {
        if (record.drop_begun) {
            ImageReader image =
                ImageReader::open(lineage.directory(0), image_name(record.image_pid));
            image.attach_sources(lineage);
            refill(record.pid, image, threads);
        }
        driver.initialize();
        driver.restore(record.pid, {});
        state = ProcessState::locked;
    }
    if (state == ProcessState::locked && record.state_before == ProcessState::running)
        unlock(record.pid, driver);
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
    wait_for_event_stop(tid);
    set_signal_mask(tid, record.signal_mask);
    record.thawed = false;
}

} // namespace gpustasis
