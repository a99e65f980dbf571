// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/undo_all.hpp"

#include "cuda_plugin/drop.hpp"
#include "cuda_plugin/guardian.hpp"
#include "cuda_plugin/turns.hpp"
#include "cuda_plugin/undo.hpp"
#include "cuda_plugin/undo_log.hpp"
#include "cuda_plugin/worker_process.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "tracee/proc.hpp"

#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <exception>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

// How often an orphaned worker looks whether criu's kernel side has let go of the tasks.
constexpr int kOrphanPollMs = 10;
// The same once something fails, hangs, or has been waited for for long: that may last.
constexpr int kDamagedPollMs = 200;
// After this time the log says what is waited for, and the others wait no more. So long what fails is tried again,
constexpr std::chrono::seconds kLongDrop{10};
constexpr int kTries = 3; // and so often, however long each takes.
// After this time the log says whose memory is still put back.
constexpr std::chrono::seconds kLongRefill{60};
constexpr std::chrono::seconds kLogTakes{5};
using Clock = std::chrono::steady_clock;
bool anything_to_undo(const TaskTable& table) noexcept {
    return std::any_of(table.tasks, table.tasks + table.task_count,
                       [](const TaskRecord& record) { return !record.settled; });
}

/// In case criu was killed while it was raised.
void lower_setting() noexcept {
    try {
        lower_userfaultfd_setting();
    } catch (const Error&) { // NOLINT(bugprone-empty-catch): the next dump and doctor see it, too
    }
}

/// What becomes of the tasks, looked at again and again.
class Undo {
public:
    Undo(std::function<Driver&()> driver, const Config& config, TaskTable& table,
         const UndoImages& images, LongCalls& calls)
        : driver_(std::move(driver)), config_(config), table_(table), images_(images),
          calls_(calls), refills_(reading_, std::chrono::hours(24 * 365)),
          restores_(calls, std::chrono::milliseconds(config.driver_timeout_ms)),
          unlocks_(calls, std::chrono::milliseconds(config.driver_timeout_ms)),
          log_(images.account_in()) {}

    /// Do what can be done now. Returns how long to wait until it is looked again.
    int look();
    void finish() { log_.finish(kLogTakes); }

private:
    bool restore(TaskRecord& record);
    bool is_awaited(TaskRecord& record);
    bool refill(TaskRecord& record);
    bool hangs(const TaskRecord& record);
    const Outcome* take(const TaskRecord& record, Turns& turns, std::function<void()> work);
    bool failed(TaskRecord& record, Turns& turns, const std::string& why);
    bool& wanted(const Turns& turns) {
        return &turns == &refills_ ? is_reading_wanted_ : is_turn_wanted_;
    }
    void has_passed(pid_t pid, const Turns& turns);
    void settle(TaskRecord& record) {
        forget_checkpoint(record);
        record.settled = true;
        was_tried_alone_.clear(); // what it held is free now
    }
    bool is_at_restore(pid_t pid) const {
        return refills_.is_begun(pid) || restores_.is_begun(pid);
    }
    void look_at_given_up();
    void look_at_given_up(TaskRecord& record, bool is_any_left);
    void unlock(TaskRecord& record);
    void tell(const TaskRecord& record, const std::string& text) {
        log_("pid " + std::to_string(record.pid) + ": " + text);
    }
    void tell_once(std::set<pid_t>& told, const TaskRecord& record, const std::string& text) {
        if (!told.contains(record.pid))
            tell(record, text);
        told.insert(record.pid);
    }
    bool is_past(std::chrono::seconds limit) const {
        return released_ && Clock::now() - *released_ > limit;
    }
    bool is_late() const { return is_past(kLongDrop); }
    template <class Use>
    void each_unsettled(Use&& use);
    using FailingAt = std::map<std::pair<pid_t, const Turns*>, Failing>;
    bool is_given_up(pid_t pid) const {
        return std::ranges::any_of(failing_, [&](const auto& one) {
            return one.first.first == pid && one.second.is_given_up;
        });
    }
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
    std::set<pid_t> slow_;       // in which it did, and failed when that ended: so it may each time
    std::set<pid_t> restored_;
    FailingAt failing_;
    std::map<pid_t, const Turns*> failed_last_; // at what
    std::set<pid_t> given_up_told_, was_tried_alone_;
    bool is_behind_ = false; // it looks at those that are given up
    bool is_alone_ = false;  // nobody else is left then
    // By others: of reading, and of calls to the driver.
    bool is_reading_wanted_ = false, is_turn_wanted_ = false;
    bool lasts_ = false; // in this look something fails, hangs, or is waited for for long
    std::map<pid_t, std::uint64_t> last_turn_; // by number
    std::uint64_t turns_ = 0;
    std::optional<Clock::time_point> released_; // when criu had let go of the first
};

/// Whether the driver is at work in the task for too long. When it is done after all, the task is brought back.
bool Undo::hangs(const TaskRecord& record) {
    if (!calls_.hangs(record.pid))
        return false;
    tell_once(hanging_, record, "the driver hangs in the task: it is brought back when that ends");
    lasts_ = true;
    return true;
}

/// Turns::take(); those that are given up get no turn that another one wants, or has had in this look.
const Outcome* Undo::take(const TaskRecord& record, Turns& turns, std::function<void()> work) {
    bool& is_wanted = wanted(turns);
    const bool was_begun = turns.is_begun(record.pid);
    const Outcome* const done =
        turns.take(record.pid, !is_behind_ || !is_wanted, std::move(work), &record.direct.moved_at);
    if (!was_begun && turns.is_begun(record.pid)) {
        last_turn_[record.pid] = ++turns_;
        if (is_alone_)
            was_tried_alone_.insert(record.pid);
    }
    is_wanted = is_wanted || (!is_behind_ && done == nullptr);
    return done;
}

/// What fails may be another's who looks at the task for a moment. Returns whether others wait for it.
bool Undo::failed(TaskRecord& record, Turns& turns, const std::string& why) {
    Failing& failing = failing_[{record.pid, &turns}];
    failed_last_[record.pid] = &turns;
    failing.why = why;
    ++failing.count;
    if (hanging_.erase(record.pid) != 0)
        slow_.insert(record.pid);
    failing.is_given_up = failing.is_given_up || Clock::now() - failing.since > kLongDrop;
    wanted(turns) = wanted(turns) || !is_given_up(record.pid);
    turns.forget(record.pid);
    lasts_ = true;
    return !failing.is_given_up;
}

/// What fails from now on does so for its own reasons.
void Undo::has_passed(pid_t pid, const Turns& turns) {
    if (failing_.erase({pid, &turns}) != 0)
        given_up_told_.erase(pid);
}

/// One that is not restored. It is tried again as long as the worker has others to look after, and then once more.
void Undo::look_at_given_up(TaskRecord& record, bool is_any_left) {
    const auto last = failing_.find({record.pid, failed_last_.at(record.pid)});
    if (last == failing_.end()) { // that has passed since
        restore(record);
        return;
    }
    if (is_any_left) {
        tell_once(given_up_told_, record,
                  last->second.why + "; this is tried again until the others are brought back");
        was_tried_alone_.erase(record.pid);
    }
    if (is_any_left || is_at_restore(record.pid) || last->second.count < kTries ||
        !was_tried_alone_.contains(record.pid)) {
        restore(record);
        return;
    }
    // Another one's last try, of which the unlock is a part, or one that hangs: it may be that one which this one needs.
    bool is_at_last_try = calls_.any_works() || reading_.any_works();
    each_unsettled([&](const TaskRecord& one) {
        is_at_last_try |= restored_.contains(one.pid) || calls_.is_in(one.pid);
    });
    if (is_at_last_try)
        return tell_once(given_up_told_, record, last->second.why + "; others are tried yet");
    if (record.direct.held) // by this process alone, which must live then
        return tell_once(given_up_told_, record, last->second.why + "; this is tried again");
    tell(record, last->second.why + "; try gpustasis recover");
    record.settled = true; // only now: until here it is not undone
}

/// First those with a try under way or done, whose outcome may concern the others.
void Undo::look_at_given_up() {
    if (std::ranges::none_of(failing_, [](const auto& one) { return one.second.is_given_up; }))
        return;
    std::set<pid_t> begun;
    each_unsettled([&](const TaskRecord& record) {
        if (is_at_restore(record.pid))
            begun.insert(record.pid);
    });
    for (const bool is_begun : {true, false}) {
        bool is_any_left = false; // that the worker cannot settle
        each_unsettled([&](const TaskRecord& record) {
            is_any_left |= !is_given_up(record.pid) ||
                           (calls_.hangs(record.pid) && !slow_.contains(record.pid)) ||
                           is_stopped(record.restore_tid) || !is_free(record);
        });
        is_alone_ = !is_any_left;
        each_unsettled([&](TaskRecord& record) {
            if (!restored_.contains(record.pid) && is_given_up(record.pid) && is_free(record) &&
                begun.contains(record.pid) == is_begun)
                look_at_given_up(record, is_any_left);
        });
    }
}

/// Returns whether others wait for the task's memory.
bool Undo::is_awaited(TaskRecord& record) {
    if (record.refill_failed)
        tell_once(damaged_, record,
                  std::string(record.refill_error) + "; this is tried again every second");
    else if (is_past(kLongRefill))
        tell_once(refilling_, record, "its memory is still put back: does the storage answer?");
    lasts_ = lasts_ || damaged_.contains(record.pid) || is_past(kLongRefill);
    return !damaged_.contains(record.pid) &&
           !(is_late() && !is_drop_over(record.pid, record.restore_tid));
}

/// The same; nobody else puts it back.
bool Undo::refill(TaskRecord& record) {
    const Outcome* const done =
        take(record, refills_, [&] { refill_task(record, images_, config_.threads, nullptr); });
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
    if (record.direct.begun && !restores_.is_begun(record.pid) && calls_.is_in(record.pid))
        return true; // its memory is being stored still
    if (!(is_missing ? refills_ : restores_).is_begun(record.pid)) {
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
            lasts_ = lasts_ || is_late();
            return !is_late();
        }
    }
    if (is_missing)
        return refill(record);
    if (refills_.is_under_way(record.pid)) // at its very end
        return true;
    refills_.forget(record.pid); // it is done
    has_passed(record.pid, refills_);
    const Outcome* const done = take(record, restores_, [&] {
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
    has_passed(record.pid, restores_);
    is_turn_wanted_ = is_turn_wanted_ || !is_given_up(record.pid); // by its unlock
    if (const auto unlock = failing_.find({record.pid, &unlocks_}); unlock != failing_.end())
        unlock->second.since += Clock::now() - done->begin; // meanwhile no unlock has failed
    return false;
}

void Undo::unlock(TaskRecord& record) {
    if (hangs(record))
        return;
    const Outcome* const done = take(record, unlocks_, [&] { undo_unlock(record, driver_()); });
    if (done == nullptr)
        return;
    if (!done->error.empty()) {
        failed(record, unlocks_, done->error);
        restored_.erase(record.pid); // a call that has ended late may have checkpointed it
        restores_.forget(record.pid);
        return;
    }
    tell(record, "criu is gone; the task was brought back and runs on");
    settle(record);
}

/// Those first whose turn is the longest ago: those that fail would take all turns.
template <class Use>
void Undo::each_unsettled(Use&& use) {
    std::vector<std::pair<std::uint64_t, TaskRecord*>> tasks;
    for (std::size_t i = 0; i < table_.task_count; ++i)
        if (TaskRecord& record = table_.tasks[i]; !record.settled) {
            const auto turn = last_turn_.find(record.pid);
            tasks.emplace_back(turn == last_turn_.end() ? 0 : turn->second, &record);
        }
    std::ranges::sort(tasks); // then in the table's order
    for (const auto& [turn, record] : tasks)
        if (!record->settled)
            use(*record);
}

int Undo::look() {
    bool waits = false;
    lasts_ = is_reading_wanted_ = is_turn_wanted_ = is_behind_ = is_alone_ = false;
    each_unsettled([&](TaskRecord& record) {
        const proc::Liveness life = proc::liveness(record.pid, record.start_time);
        if (life == proc::Liveness::traced || life == proc::Liveness::unknown) {
            waits |= !is_late();
            lasts_ = lasts_ || is_late();
            return; // criu, or the kernel on its behalf, still holds it
        }
        if (life == proc::Liveness::dead || record.gone) {
            forget_drop(record);
            calls_.give_up(record.pid);
            reading_.give_up(record.pid);
            settle(record);
            return;
        }
        if (!released_)
            released_ = Clock::now();
        if (!restored_.contains(record.pid) && !is_given_up(record.pid))
            waits |= restore(record);
    });
    for (const bool is_last : {false, true}) { // those that are given up
        is_behind_ = is_last;
        each_unsettled([&](TaskRecord& record) {
            if (waits || !restored_.contains(record.pid) || is_given_up(record.pid) != is_last)
                return;
            if (!is_stopped(record.restore_tid) && is_free(record))
                unlock(record);
            else
                lasts_ = lasts_ || is_late();
        });
    }
    look_at_given_up();
    return lasts_ ? kDamagedPollMs : kOrphanPollMs;
}

} // namespace

void undo_all(const std::function<Driver&()>& driver, const Config& config, TaskTable& table,
              const UndoImages& images, LongCalls& calls) {
    // It stays where it is: threads that hang use it until the process ends.
    auto* const undo =
        new Undo(driver, config, table, images, calls); // NOLINT(cppcoreguidelines-owning-memory)
    lower_setting();
    while (anything_to_undo(table)) {
        calls.begin_turn();
        int wait_ms = kDamagedPollMs;
        try {
            wait_ms = undo->look();
        } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): want of memory may pass
        }
        if (anything_to_undo(table))
            ::poll(nullptr, 0, wait_ms);
    }
    undo->finish();
    lower_setting(); // at the first time a dying criu may have held the lock still
}

} // namespace gpustasis
