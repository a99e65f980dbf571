#include "cuda_plugin/undo.hpp"

#include "core/image_reader.hpp"
#include "core/manifest.hpp"
#include "cuda_plugin/staging.hpp"

#include <sys/ptrace.h>
#include <sys/wait.h>

#include <cerrno>

namespace cudackpt {
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

void undo_task(const TaskRecord& record, Driver& driver, int image_dir, unsigned threads) {
    ProcessState state = driver.state(record.pid);
    if (state == ProcessState::failed)
        throw Error(Errc::io, "the driver has given the process up (state FAILED)");
    if (state == ProcessState::checkpointed && record.state_before != ProcessState::checkpointed) {
        if (record.drop_begun)
            refill(record.pid, ImageReader::open(image_dir, image_name(record.image_pid)), threads);
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
    if (::ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) != 0)
        throw io_error("cannot seize restore thread " + std::to_string(tid), errno);
    std::uint64_t mask = record.signal_mask;
    int status = 0;
    const bool done = ::ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr) == 0
                      && ::waitpid(tid, &status, __WALL) == tid && WIFSTOPPED(status)
                      && ::ptrace(static_cast<__ptrace_request>(0x420b), tid,
                                  sizeof(mask), &mask)
                             == 0;
    const int error = errno;
    ::ptrace(PTRACE_DETACH, tid, nullptr, nullptr);
    if (!done)
        throw io_error("cannot reset the signal mask of thread " + std::to_string(tid), error);
    record.thawed = false;
}

} // namespace cudackpt
