// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"
#include "worker_rig.hpp"

#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/side_by_side.hpp"
#include "cuda_plugin/worker.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

using namespace gpustasis;
using sample::Bystander;
using sample::find_worker;
using sample::Rig;
using sample::Slow;
using sample::Variable;

namespace {

void expect_done(Worker& worker, std::vector<Worker::Call>& calls) {
    while (!calls.empty()) {
        const Worker::Answer answer = worker.wait(calls);
        CHECK(!answer.error && !answer.lost);
        calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(answer.index));
    }
}

void calls_are_made_side_by_side() {
    const Variable meet("SLOW_DRIVER_MEET", "3");
    const Variable alone("SLOW_DRIVER_MEET_MS", "15000"); // this process may be held up between two
    Rig rig(OnOrphaned::undo);
    std::vector<Worker::Call> calls;
    for (int pid = 1; pid <= 3; ++pid)
        calls.push_back(rig.worker->begin_lock(pid, 10'000));
    CHECK(rig.worker->state(2) == ProcessState::running); // meanwhile, and whatever came before
    std::set<std::size_t> seen;
    while (!calls.empty()) {
        const Worker::Answer answer = rig.worker->wait(calls);
        CHECK(!answer.error && !answer.lost && answer.index < calls.size());
        seen.insert(static_cast<std::size_t>(calls[answer.index].pid));
        calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(answer.index));
    }
    CHECK(seen == (std::set<std::size_t>{1, 2, 3}));
    rig.worker->stop();
}

void no_more_calls_are_made_at_once_than_are_wanted() {
    const Variable meet("SLOW_DRIVER_MEET", "2");
    for (const std::size_t limit : {std::size_t{1}, std::size_t{2}}) {
        // Two meet, however long this process is held up between them.
        const Variable alone("SLOW_DRIVER_MEET_MS", limit == 1 ? "3000" : "15000");
        Rig rig(OnOrphaned::undo);
        std::size_t under_way = 0;
        std::size_t most = 0;
        int refused = 0;
        side_by_side(
            *rig.worker, 4, {.limit = limit, .memory = {}, .room = {}},
            [&](std::size_t i) -> std::optional<Worker::Call> {
                if (i == 3)
                    return std::nullopt; // nothing is to be done
                most = std::max(most, ++under_way);
                return rig.worker->begin_lock(static_cast<int>(i) + 1, 20'000);
            },
            [&](const CallsUnderWay::Answer& answer) {
                --under_way;
                refused += answer.error ? 1 : 0; // it has waited alone for another
            });
        CHECK(most == limit);
        CHECK(refused == (limit == 1 ? 1 : 0)); // who comes later finds that one has been there
        rig.worker->stop();
    }
}

void after_a_failure_none_is_begun_and_all_are_waited_for() {
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "300");
    Rig rig(OnOrphaned::undo);
    std::size_t begun = 0;
    std::size_t done = 0;
    std::size_t failed = 0;
    const auto begin = std::chrono::steady_clock::now();
    CHECK_THROWS(Errc::io, side_by_side(
                               *rig.worker, 8, {.limit = 3, .memory = {}, .room = {}},
                               [&](std::size_t i) -> std::optional<Worker::Call> {
                                   if (i == 2)
                                       throw Error(Errc::io, "this one cannot");
                                   ++begun;
                                   return rig.worker->begin_checkpoint(static_cast<int>(i) + 1, 0);
                               },
                               [&](const CallsUnderWay::Answer&) { ++done; }, [&] { ++failed; }));
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(300));
    CHECK(begun == 2);
    CHECK(done == 0);
    CHECK(failed == 1);
    CHECK(rig.worker->state(1) ==
          ProcessState::running); // no reply to an earlier call is in the way
    rig.worker->stop();
}

void what_memory_has_no_room_for_at_once_is_done_in_turn() {
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "50");
    for (const bool is_known : {true, false}) {
        Rig rig(OnOrphaned::undo);
        std::vector<std::size_t> begun;
        std::size_t under_way = 0;
        std::vector<std::size_t> beside; // how many were, when each was begun
        side_by_side(
            *rig.worker, 4,
            {.limit = 8,
             .memory =
                 [&](std::size_t i) {
                     return is_known ? std::optional<std::uint64_t>(i == 3 ? 100 : 40)
                                     : std::nullopt;
                 },
             .room = [](std::size_t) { return std::uint64_t{90}; }},
            [&](std::size_t i) -> std::optional<Worker::Call> {
                beside.push_back(under_way++);
                return rig.worker->begin_checkpoint(static_cast<int>(i) + 1, 0);
            },
            [&](const CallsUnderWay::Answer& answer) {
                CHECK(!answer.error);
                --under_way;
            });
        if (is_known) // two fit; the last fits nowhere, and is done all the same
            CHECK(beside == (std::vector<std::size_t>{0, 1, 1, 0}));
        else
            CHECK(beside == (std::vector<std::size_t>{0, 0, 0, 0}));
        rig.worker->stop();
    }
}

// The driver is not broken off in one task because it hangs in another.
void who_gives_one_call_up_waits_for_the_others() {
    const Variable hangs("SLOW_DRIVER_HANGS", "7");
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "6000");
    Rig rig(OnOrphaned::undo);
    rig.config.driver_timeout_ms = 500;
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0)};
    rig.config.driver_timeout_ms = 60'000;
    calls.push_back(rig.worker->begin_checkpoint(8, 0));
    const Worker::Answer first = rig.worker->wait(calls);
    CHECK(first.index == 0 && first.error && !first.lost);
    CHECK(rig.worker->is_there());
    CHECK(rig.worker->state(8) == ProcessState::running);
    calls.erase(calls.begin());
    const Worker::Answer second = rig.worker->wait(calls);
    CHECK(second.index == 0 && !second.error && !second.lost);
    CHECK(!rig.worker->is_there()); // what hangs is ended with it
    CHECK(rig.worker->state(8) == ProcessState::running);
    rig.worker->stop();
}

// What was given up is answered after all, while the driver is at work in another task: that one is waited for.
void a_late_answer_breaks_off_no_other_call() {
    const Variable meet("SLOW_DRIVER_MEET", "2");
    const Variable alone("SLOW_DRIVER_MEET_MS", "8000"); // a lock that is alone fails then
    // Given up long before, and answered before that.
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "6000");
    Rig rig(OnOrphaned::undo);
    rig.config.driver_timeout_ms = 100;
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0),
                                    rig.worker->begin_lock(8, 20'000)};
    const Worker::Answer first = rig.worker->wait(calls);
    CHECK(first.index == 0 && first.error && !first.lost);
    calls.erase(calls.begin());
    const Worker::Answer second = rig.worker->wait(calls);
    CHECK(second.index == 0 && second.error && !second.lost);
    CHECK(rig.worker->state(8) == ProcessState::running);
    rig.worker->stop();
}

// A quick call hangs, and with it whatever is asked after it: that is said at once. What is under way ends.
void who_hangs_in_a_quick_call_is_asked_nothing_more() {
    const Variable mute("SLOW_DRIVER_MUTE", "9");
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "1500");
    Rig rig(OnOrphaned::undo);
    rig.config.driver_timeout_ms = 60'000;
    CHECK(rig.worker->api_version() == 13000);
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(8, 0)};
    const auto begin = std::chrono::steady_clock::now();
    const pid_t child = ::fork();
    if (child == 0)
        ::_exit(0);
    rig.worker->watch(child); // it dies at once: nobody waits for the deadline
    CHECK_THROWS(Errc::io, rig.worker->state(9));
    rig.worker->watch(0);
    CHECK(!rig.worker->is_there());
    CHECK_THROWS(Errc::io, rig.worker->state(8));
    CHECK_THROWS(Errc::io, rig.worker->begin_checkpoint(7, 0));
    const Worker::Answer answer = rig.worker->wait(calls);
    CHECK(!answer.error && !answer.lost);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
    CHECK(rig.worker->state(8) == ProcessState::running); // by a new one
    CHECK(::waitpid(child, nullptr, 0) == child);
    rig.worker->stop();
}

void who_dies_has_lost_all_calls() {
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "60000");
    Rig rig(OnOrphaned::undo);
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0),
                                    rig.worker->begin_checkpoint(8, 0)};
    const pid_t worker = find_worker();
    CHECK(worker != 0 && ::kill(worker, SIGKILL) == 0);
    const auto begin = std::chrono::steady_clock::now();
    while (!calls.empty()) {
        const Worker::Answer answer = rig.worker->wait(calls);
        CHECK(answer.error && answer.lost);
        calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(answer.index));
        CHECK(rig.worker->state(1) ==
              ProcessState::running); // by a new one, which has no such call
    }
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30));
    CHECK(::waitpid(worker, nullptr, 0) == worker);
    rig.worker->stop();
}

void a_call_is_given_up_when_its_own_task_dies() {
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "60000");
    Rig rig(OnOrphaned::undo);
    const pid_t child = ::fork();
    if (child == 0)
        ::_exit(0);
    const std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(1, 0),
                                          rig.worker->begin_checkpoint(2, child)};
    const Worker::Answer answer = rig.worker->wait(calls);
    CHECK(answer.index == 1 && answer.error);
    CHECK(::waitpid(child, nullptr, 0) == child);
    rig.worker->stop();
}

// The worker is still in the driver for two tasks when criu dies: it undoes when it is out of it.
void an_orphan_undoes_when_its_calls_have_ended() {
    const Bystander task;
    const Slow slow("SLOW_DRIVER_CHECKPOINT_MS", "1000");
    Rig rig(OnOrphaned::undo);
    CHECK(rig.worker->state(task.pid()) == ProcessState::running);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    const auto begin = std::chrono::steady_clock::now();
    rig.worker->begin_checkpoint(task.pid(), 0);
    rig.worker->begin_checkpoint(1, 0);
    CHECK(comes_true([&] { return slow.is_in_it(); }));
    const pid_t worker = find_worker();
    CHECK(worker != 0);
    rig.worker.reset();
    CHECK(comes_true([&] { return record.settled.load(); }));
    CHECK(std::chrono::steady_clock::now() - begin >= std::chrono::milliseconds(1000));
    CHECK(::waitpid(worker, nullptr, 0) == worker);
}

// Loading the driver is no call: the first ones that are made at once find it ready.
void calls_side_by_side_are_not_the_first() {
    const Bystander tasks[2];
    const Variable moves("SLOW_DRIVER_MOVES", "1");
    const Slow slow("SLOW_DRIVER_RESTORE_MS", "1", "1");
    Rig rig(OnOrphaned::undo);
    std::vector<Worker::Call> calls;
    for (const Bystander& task : tasks) {
        TaskRecord& record = rig.table.add(task.pid());
        record.lock_begun = true;
        calls.push_back(rig.worker->begin_undo_unlock(record, 0));
    }
    expect_done(*rig.worker, calls);
    rig.worker->stop();
}

// A driver that answers one call after the other has not begun with all of them.
void what_waits_for_other_calls_does_not_hang() {
    const Variable turns("SLOW_DRIVER_IN_TURN", "1");
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "4000");
    Rig rig(OnOrphaned::undo);
    rig.config.driver_timeout_ms = 10'000; // the first has long ended, and the third has not
    std::vector<Worker::Call> calls;
    for (int pid = 1; pid <= 3; ++pid)
        calls.push_back(rig.worker->begin_checkpoint(pid, 0));
    expect_done(*rig.worker, calls);
    rig.worker->stop();
}

void both_halves_of_an_undo_are_done_by_the_worker() {
    const Bystander task;
    const Variable moves("SLOW_DRIVER_MOVES", "1");
    const Slow slow("SLOW_DRIVER_RESTORE_MS", "1", "2");
    Rig rig(OnOrphaned::undo);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    record.lock_begun = record.checkpoint_begun = true;
    std::vector<Worker::Call> calls{rig.worker->begin_undo_restore(record, 0)};
    CHECK(!rig.worker->wait(calls).error);
    CHECK(slow.is_in_it());
    CHECK(rig.worker->state(task.pid()) == ProcessState::locked);
    calls = {rig.worker->begin_undo_unlock(record, 0)};
    CHECK(!rig.worker->wait(calls).error);
    CHECK(rig.worker->state(task.pid()) == ProcessState::running);
    rig.worker->stop();
}

// A driver that says that it has done it, and has not.
void a_way_back_that_was_not_taken_is_an_error() {
    const Bystander task;
    const Slow slow("SLOW_DRIVER_RESTORE_MS", "1", "2");
    Rig rig(OnOrphaned::undo);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    record.lock_begun = record.checkpoint_begun = true;
    std::vector<Worker::Call> calls{rig.worker->begin_undo_restore(record, 0)};
    CHECK(!rig.worker->wait(calls).error);
    calls = {rig.worker->begin_undo_unlock(record, 0)};
    CHECK(rig.worker->wait(calls).error);
    record.state_before = ProcessState::locked; // as of a rank, which its keeper unlocks
    calls = {rig.worker->begin_undo_restore(record, 0)};
    CHECK(rig.worker->wait(calls).error);
    rig.worker->stop();
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    calls_are_made_side_by_side();
    no_more_calls_are_made_at_once_than_are_wanted();
    after_a_failure_none_is_begun_and_all_are_waited_for();
    what_memory_has_no_room_for_at_once_is_done_in_turn();
    who_gives_one_call_up_waits_for_the_others();
    a_late_answer_breaks_off_no_other_call();
    who_hangs_in_a_quick_call_is_asked_nothing_more();
    who_dies_has_lost_all_calls();
    a_call_is_given_up_when_its_own_task_dies();
    an_orphan_undoes_when_its_calls_have_ended();
    calls_side_by_side_are_not_the_first();
    what_waits_for_other_calls_does_not_hang();
    both_halves_of_an_undo_are_done_by_the_worker();
    a_way_back_that_was_not_taken_is_an_error();
}
