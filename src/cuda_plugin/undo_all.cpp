// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/undo_all.hpp"

#include "core/unique_fd.hpp"
#include "cuda_plugin/drop.hpp"
#include "cuda_plugin/guardian.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <poll.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <utility>

namespace gpustasis {
namespace {

// How often an orphaned worker looks whether criu's kernel side has let go of the tasks.
constexpr int kOrphanPollMs = 10;
// The same once it is known that an image cannot be read: that may last.
constexpr int kDamagedPollMs = 200;
// After this time the log says what is waited for, and the others wait no more. So long what fails is tried again.
constexpr std::chrono::seconds kLongDrop{10};
// After this time the log says whose memory is still put back.
constexpr std::chrono::seconds kLongRefill{60};
constexpr std::chrono::seconds kLogTakes{5};

using Clock = std::chrono::steady_clock;

/// An account of what was done when nobody was there to be told. It is written in a thread of its own: the directory
/// may be on storage that does not answer.
class UndoLog {
public:
    explicit UndoLog(int image_dir) noexcept : image_dir_(image_dir) {}

    /// Throws std::system_error if there can be no thread.
    void operator()(std::string line) {
        const std::lock_guard lock(lines_->mutex);
        lines_->waiting.push_back(std::move(line) + "\n");
        if (!is_begun_)
            std::thread([lines = lines_, dir = image_dir_] { write(*lines, dir); }).detach();
        is_begun_ = true;
        lines_->changed.notify_all();
    }

    /// Wait until all is written, for `limit` at most.
    void finish(std::chrono::milliseconds limit) {
        std::unique_lock lock(lines_->mutex);
        lines_->changed.wait_for(lock, limit, [&] { return lines_->waiting.empty(); });
    }

private:
    struct Lines {
        std::mutex mutex;
        std::condition_variable changed;
        std::deque<std::string> waiting; ///< the first stays until it is written
    };

    static void write(Lines& lines, int image_dir) {
        // Without a file (a full disk, a vanished directory) the undo still has to be done. Nor may a
        // FIFO that was put in its place hold it up.
        const UniqueFd file(
            ::openat(image_dir, kUndoLogName,
                     O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK, 0600));
        std::unique_lock lock(lines.mutex);
        for (;;) {
            lines.changed.wait(lock, [&] { return !lines.waiting.empty(); });
            const std::string line = lines.waiting.front();
            lock.unlock();
            static_cast<void>(::write(file.get(), line.data(), line.size()) == 0);
            lock.lock();
            lines.waiting.pop_front();
            lines.changed.notify_all();
        }
    }

    int image_dir_;
    bool is_begun_ = false;
    std::shared_ptr<Lines> lines_ = std::make_shared<Lines>();
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

/// What came of work in a thread of LongCalls.
struct Outcome {
    std::atomic<bool> is_there = false;
    std::string error; ///< why it was not done; empty: it was
};

/// Work for one task after the other, as tasks that share memory need it.
class Turns {
public:
    /// `limit`: of one's work; then it hangs.
    Turns(LongCalls& calls, std::chrono::milliseconds limit) noexcept
        : calls_(calls), limit_(limit) {}

    /// What came of it; nullptr: it is not done yet, and is begun if no other is under way. `work` may throw.
    const Outcome* take(pid_t pid, std::function<void()> work) {
        std::shared_ptr<Outcome>& outcome = outcomes_[pid];
        if (!outcome && !calls_.any_works())
            begin(pid, outcome, std::move(work));
        return outcome && outcome->is_there ? outcome.get() : nullptr;
    }
    void forget(pid_t pid) { outcomes_.erase(pid); }
    bool is_begun(pid_t pid) const { return outcomes_.contains(pid) && outcomes_.at(pid); }

private:
    void begin(pid_t pid, std::shared_ptr<Outcome>& outcome, std::function<void()> work) {
        outcome = std::make_shared<Outcome>();
        const auto fail = [](Outcome& of, const std::exception& e) noexcept {
            of.error = e.what();
            of.is_there = true;
        };
        try {
            calls_.begin(pid, limit_, [work = std::move(work), fail, of = outcome] {
                try {
                    work();
                    of->is_there = true;
                } catch (const std::exception& e) {
                    fail(*of, e);
                }
            });
        } catch (const std::exception& e) {
            fail(*outcome, e);
        }
    }

    LongCalls& calls_;
    std::chrono::milliseconds limit_;
    std::map<pid_t, std::shared_ptr<Outcome>> outcomes_;
};

/// What becomes of the tasks, looked at again and again.
class Undo {
public:
    Undo(std::function<Driver&()> driver, const Config& config, TaskTable& table,
         const UndoImages& images, LongCalls& calls)
        : driver_(std::move(driver)), config_(config), table_(table), images_(images),
          calls_(calls), refills_(reading_, std::chrono::hours(24 * 365)),
          restores_(calls, std::chrono::milliseconds(config.driver_timeout_ms)),
          unlocks_(calls, std::chrono::milliseconds(config.driver_timeout_ms)),
          log_(images.lineage().directory(0)) {}

    /// Do what can be done now. Returns how long to wait until it is looked again.
    int look();
    void finish() { log_.finish(kLogTakes); }

private:
    bool restore(TaskRecord& record);
    bool is_awaited(TaskRecord& record);
    bool refill(TaskRecord& record);
    bool hangs(const TaskRecord& record);
    bool failed(TaskRecord& record, Turns& turns, const std::string& why);
    void unlock(TaskRecord& record);
    void tell(const TaskRecord& record, const std::string& text) {
        log_("pid " + std::to_string(record.pid) + ": " + text);
    }
    void tell_once(std::set<pid_t>& told, const TaskRecord& record, const std::string& text) {
        if (told.insert(record.pid).second)
            tell(record, text);
    }
    bool is_past(std::chrono::seconds limit) const {
        return released_ && Clock::now() - *released_ > limit;
    }
    bool is_late() const { return is_past(kLongDrop); }

    const std::function<Driver&()> driver_;
    const Config& config_;
    TaskTable& table_;
    const UndoImages& images_;
    LongCalls& calls_;
    LongCalls reading_;
    Turns refills_, restores_, unlocks_;
    UndoLog log_;
    std::set<pid_t> damaged_;    // of whose memory it is known that some cannot be put back
    std::set<pid_t> refilling_;  // of whom it was told that this takes long
    std::set<pid_t> waited_for_; // whose restore thread has not come back for long
    std::set<pid_t> hanging_;    // in which the driver hangs
    std::set<pid_t> restored_;
    std::map<pid_t, Clock::time_point> failing_; // since when
    bool tries_again_ = false;
    std::optional<Clock::time_point> released_; // when criu had let go of the first
};

/// Whether the driver is at work in the task for too long. When it is done after all, the task is brought back.
bool Undo::hangs(const TaskRecord& record) {
    if (!calls_.hangs(record.pid))
        return false;
    tell_once(hanging_, record, "the driver hangs in the task: it is brought back when that ends");
    return true;
}

/// What fails may be another's who looks at the task for a moment. Returns whether it is tried again.
bool Undo::failed(TaskRecord& record, Turns& turns, const std::string& why) {
    const auto since = failing_.try_emplace(record.pid, Clock::now()).first->second;
    if (Clock::now() - since > kLongDrop) {
        tell(record, why + "; try gpustasis recover");
        record.settled = true; // only now: until here it is not undone
        return false;
    }
    turns.forget(record.pid);
    tries_again_ = true;
    return true;
}

/// Returns whether others wait for the task's memory.
bool Undo::is_awaited(TaskRecord& record) {
    if (record.refill_failed)
        tell_once(damaged_, record,
                  std::string(record.refill_error) + "; this is tried again every second");
    else if (is_past(kLongRefill))
        tell_once(refilling_, record, "its memory is still put back: does the storage answer?");
    return !damaged_.contains(record.pid) &&
           !(is_late() && !is_drop_over(record.pid, record.restore_tid));
}

/// The same; nobody else puts it back.
bool Undo::refill(TaskRecord& record) {
    const Outcome* const done =
        refills_.take(record.pid, [&] { refill_task(record, images_, config_.threads, nullptr); });
    if (done != nullptr && !done->error.empty())
        return failed(record, refills_, done->error);
    if (is_past(kLongRefill))
        tell_once(refilling_, record, "its memory is still put back: does the storage answer?");
    return true;
}

/// Returns whether others wait for the task.
bool Undo::restore(TaskRecord& record) {
    const bool is_missing = record.drop_begun && !record.refilled;
    if (hangs(record))
        return false;
    if (!refills_.is_begun(record.pid) && !restores_.is_begun(record.pid)) {
        bool is_home = !is_stopped(record.restore_tid);
        if (is_missing) {
            if (is_guarded(record))
                return is_awaited(record);
            if (record.gone)
                return true; // which the next look sees
            is_home = is_home && is_drop_over(record.pid, record.restore_tid);
        }
        if (!is_home) {
            if (is_late())
                tell_once(waited_for_, record,
                          "waits until restore thread " + std::to_string(record.restore_tid) +
                              " is back in a call of its own: is the task stopped, frozen or "
                              "traced?");
            return !is_late();
        }
    }
    if (is_missing && !record.refilled)
        return refill(record);
    const Outcome* const done = restores_.take(record.pid, [&] {
        forget_drop(record);
        reset_signal_mask(record);
        if (record.checkpoint_begun)
            undo_restore(record, driver_());
    });
    if (done == nullptr)
        return true;
    if (!done->error.empty())
        return failed(record, restores_, done->error);
    restored_.insert(record.pid);
    failing_.erase(record.pid);
    return false;
}

void Undo::unlock(TaskRecord& record) {
    if (hangs(record))
        return;
    const Outcome* const done = unlocks_.take(record.pid, [&] { undo_unlock(record, driver_()); });
    if (done == nullptr)
        return;
    if (!done->error.empty()) {
        failed(record, unlocks_, done->error);
        return;
    }
    tell(record, "criu is gone; the task was brought back and runs on");
    record.settled = true;
}

int Undo::look() {
    bool waits = false;
    tries_again_ = false;
    for (std::size_t i = 0; i < table_.task_count; ++i) {
        TaskRecord& record = table_.tasks[i];
        if (record.settled)
            continue;
        const proc::Liveness life = proc::liveness(record.pid, record.start_time);
        if (life == proc::Liveness::traced || life == proc::Liveness::unknown) {
            waits |= !is_late();
            continue; // criu, or the kernel on its behalf, still holds it
        }
        if (life == proc::Liveness::dead || record.gone) {
            forget_drop(record);
            forget_checkpoint(record);
            record.settled = true;
            continue;
        }
        if (!released_)
            released_ = Clock::now();
        if (!restored_.contains(record.pid))
            waits |= restore(record);
    }
    for (std::size_t i = 0; !waits && i < table_.task_count; ++i) {
        TaskRecord& record = table_.tasks[i];
        // Meanwhile it may have died, or another dump may have begun.
        if (!record.settled && restored_.contains(record.pid) && !is_stopped(record.restore_tid) &&
            proc::liveness(record.pid, record.start_time) == proc::Liveness::untraced)
            unlock(record);
    }
    return damaged_.empty() && !tries_again_ ? kOrphanPollMs : kDamagedPollMs;
}

} // namespace

void undo_all(const std::function<Driver&()>& driver, const Config& config, TaskTable& table,
              const UndoImages& images, LongCalls& calls) {
    // It stays where it is: threads that hang use it until the process ends.
    auto* const undo =
        new Undo(driver, config, table, images, calls); // NOLINT(cppcoreguidelines-owning-memory)
    lower_setting();
    while (anything_to_undo(table)) {
        const int wait_ms = undo->look();
        if (anything_to_undo(table))
            ::poll(nullptr, 0, wait_ms);
    }
    undo->finish();
    lower_setting(); // at the first time a dying criu may have held the lock still
}

} // namespace gpustasis
