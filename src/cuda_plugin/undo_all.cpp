// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/undo_all.hpp"

#include "cuda_plugin/drop.hpp"
#include "cuda_plugin/guardian.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <poll.h>

#include <chrono>
#include <cstdio>
#include <exception>
#include <memory>
#include <optional>
#include <set>
#include <string>

namespace gpustasis {
namespace {

// How often an orphaned worker looks whether criu's kernel side has let go of the tasks.
constexpr int kOrphanPollMs = 10;
// The same once it is known that an image cannot be read: that may last.
constexpr int kDamagedPollMs = 200;
// After this time the log says what is waited for, and the others wait no more.
constexpr std::chrono::seconds kLongDrop{10};

using Clock = std::chrono::steady_clock;

/// An account of what was done when nobody was there to be told.
class UndoLog {
public:
    explicit UndoLog(int image_dir) {
        const int fd =
            ::openat(image_dir, kUndoLogName,
                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600);
        // Without a file (a full disk, a vanished directory) the undo still has to be done. Nor may a
        // FIFO that was put in its place hold it up.
        file_.reset(fd < 0 ? nullptr : ::fdopen(fd, "a"));
    }
    void operator()(const std::string& text) {
        if (file_) {
            std::fprintf(file_.get(), "%s\n", text.c_str());
            std::fflush(file_.get());
        }
    }

private:
    struct Close {
        void operator()(std::FILE* file) const noexcept { std::fclose(file); }
    };
    std::unique_ptr<std::FILE, Close> file_;
};

bool anything_to_undo(const TaskTable& table) noexcept {
    for (std::size_t i = 0; i < table.task_count; ++i)
        if (!table.tasks[i].settled)
            return true;
    return false;
}

/// In case criu was killed while it was raised.
void lower_setting() noexcept {
    try {
        lower_userfaultfd_setting();
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): the next dump and doctor see it, too
    }
}

/// Whether the driver would wait for that thread for ever.
bool is_stopped(pid_t tid) noexcept {
    try {
        const char state = tid == 0 ? 'S' : proc::state(tid);
        return state == 'T' || state == 't';
    } catch (const std::exception&) {
        return false; // it has ended: the driver says what that means
    }
}

} // namespace

void undo_all(const std::function<Driver&()>& driver, const Config& config, TaskTable& table,
              const UndoImages& images) {
    std::unique_ptr<UndoLog> log; // made when there is something to tell
    std::set<pid_t> told;         // of whose memory it is known that some cannot be put back
    std::set<pid_t> waited_for;   // whose restore thread has not come back for long
    std::set<pid_t> restored;
    std::optional<Clock::time_point> released; // when criu had let go of the first
    const auto tell = [&](const TaskRecord& record, const std::string& text) {
        if (!log)
            log = std::make_unique<UndoLog>(images.lineage().directory(0));
        (*log)("pid " + std::to_string(record.pid) + ": " + text);
    };
    lower_setting();
    while (anything_to_undo(table)) {
        bool waits = false;
        const bool is_late = released && Clock::now() - *released > kLongDrop;
        for (std::size_t i = 0; i < table.task_count; ++i) {
            TaskRecord& record = table.tasks[i];
            if (record.settled)
                continue;
            const proc::Liveness life = proc::liveness(record.pid, record.start_time);
            if (life == proc::Liveness::traced || life == proc::Liveness::unknown) {
                waits |= !is_late;
                continue; // criu, or the kernel on its behalf, still holds it
            }
            if (life == proc::Liveness::dead || record.gone) {
                forget_drop(record);
                forget_checkpoint(record);
                record.settled = true;
                continue;
            }
            if (!released)
                released = Clock::now();
            if (restored.contains(record.pid))
                continue;
            bool is_home = !is_stopped(record.restore_tid);
            if (record.drop_begun && !record.refilled) {
                if (is_guarded(record)) {
                    if (record.refill_failed && told.insert(record.pid).second)
                        tell(record, std::string(record.refill_error) +
                                         "; this is tried again every second");
                    waits |= !told.contains(record.pid) &&
                             !(is_late && !is_drop_over(record.pid, record.restore_tid));
                    continue;
                }
                if (record.gone) {
                    waits = true;
                    continue;
                }
                is_home = is_home && is_drop_over(record.pid, record.restore_tid);
            }
            if (!is_home) {
                if (is_late && waited_for.insert(record.pid).second)
                    tell(record,
                         "waits until restore thread " + std::to_string(record.restore_tid) +
                             " is back in a call of its own: is the task stopped, frozen or "
                             "traced?");
                waits |= !is_late;
                continue;
            }
            try {
                refill_task(record, images, config.threads, nullptr);
                reset_signal_mask(record);
                undo_restore(record, driver());
                restored.insert(record.pid);
            } catch (const std::exception& e) {
                tell(record, std::string(e.what()) + "; try gpustasis recover");
                record.settled = true; // only now: until here it is not undone
            }
        }
        for (std::size_t i = 0; !waits && i < table.task_count; ++i) {
            TaskRecord& record = table.tasks[i];
            if (record.settled || is_stopped(record.restore_tid) || restored.erase(record.pid) == 0)
                continue;
            try {
                undo_unlock(record, driver());
                tell(record, "criu is gone; the task was brought back and runs on");
            } catch (const std::exception& e) {
                tell(record, std::string(e.what()) + "; try gpustasis recover");
            }
            record.settled = true;
        }
        if (anything_to_undo(table))
            ::poll(nullptr, 0, told.empty() ? kOrphanPollMs : kDamagedPollMs);
    }
    lower_setting(); // at the first time a dying criu may have held the lock still
}

} // namespace gpustasis
