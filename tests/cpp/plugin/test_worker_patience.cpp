// SPDX-License-Identifier: Apache-2.0
// Who waits for a driver that is at work elsewhere, or that had no time itself, does not hang.
#include "check.hpp"
#include "worker_rig.hpp"

#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/worker.hpp"
#include "device_memory/device_copy.hpp"

#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;
using sample::Bystander;
using sample::find_worker;
using sample::Rig;
using sample::Variable;

namespace {

// However long it waits there: the driver may be at work for another process.
void who_waits_to_be_handed_memory_is_not_killed_when_the_one_before_has_ended() {
    const Bystander task;
    const Variable hangs("SLOW_DRIVER_HANGS", "7");
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "6000");
    Rig rig(OnOrphaned::undo);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    rig.config.driver_timeout_ms = 500;
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0)};
    rig.config.driver_timeout_ms = 60'000;
    calls.push_back(rig.worker->begin_checkpoint(8, 0));
    record.direct.asking = true; // moved_at is 0: for longer than any call has
    CHECK(rig.worker->wait(calls).error);
    calls.erase(calls.begin());
    CHECK(!rig.worker->wait(calls).error);
    CHECK(rig.worker->is_there());
    // Whenever it may be killed, it is told so first.
    std::atomic<bool> ends = false, seen = false;
    std::thread watching([&] {
        while (!ends)
            if (record.direct.ending)
                seen = true;
    });
    for (int i = 0; i < 10'000 && !seen; ++i) {
        calls = {rig.worker->begin_unlock(8, 0)};
        CHECK(!rig.worker->wait(calls).error);
    }
    ends = true;
    watching.join();
    CHECK(seen && !record.direct.ending);
    rig.config.driver_timeout_ms = 500;
    calls = {rig.worker->begin_checkpoint(7, 0)};
    CHECK(rig.worker->wait(calls).error);
    CHECK(rig.worker->is_there());
    record.direct.asking = false;
    calls = {rig.worker->begin_checkpoint(7, 0)};
    CHECK(rig.worker->wait(calls).error);
    CHECK(!rig.worker->is_there());
    rig.worker->stop();
}

// A driver that does one operation after the other may not have begun with it yet.
void what_may_wait_behind_memory_that_moves_is_not_given_up() {
    const Bystander task;
    const Variable hangs("SLOW_DRIVER_HANGS", "7");
    Rig rig(OnOrphaned::undo);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    rig.config.driver_timeout_ms = 3'000;
    using Clock = std::chrono::steady_clock;
    std::atomic<Clock::time_point> last = Clock::now(); // of the moves that came in time
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0)};
    std::thread moving([&] {
        for (int i = 0; i < 60; ++i) {
            const auto now = Clock::now();
            touch(record.direct.moved_at);
            if (Clock::now() - last.load() > std::chrono::milliseconds(2'000))
                break; // it was held up itself, and may have been given up before
            last = now;
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
        }
    });
    CHECK(rig.worker->wait(calls).error);
    const auto end = Clock::now();
    moving.join();
    CHECK(end - last.load() >= std::chrono::milliseconds(2'900));
    rig.worker->stop();
}

// However long the storage stands still: what is asked meanwhile waits in such a driver behind it. Once the memory is held no
// more, it has its own time.
void a_quick_call_behind_memory_that_stands_still_is_not_given_up() {
    const Bystander task;
    const Variable mute("SLOW_DRIVER_MUTE", std::to_string(task.pid()));
    const Variable late("SLOW_DRIVER_STATE_MS", "32000"); // longer than a quick call may take
    Rig rig(OnOrphaned::undo);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    rig.config.driver_timeout_ms = 500;
    rig.worker->begin_restore_direct(record, {}, 0); // asks for its state, and stands still there
    record.direct.held = true;
    CHECK(rig.worker->state(9) == ProcessState::running);
    record.direct.held = false;
    CHECK_THROWS(Errc::io, rig.worker->state(9));
    rig.worker->stop();
}

// As by the freezer of their control group: neither of both had the time.
void nothing_is_given_up_because_all_were_stopped() {
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "3000");
    Rig rig(OnOrphaned::undo);
    rig.config.driver_timeout_ms = 8'000;
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0)};
    const pid_t worker = find_worker(), self = ::getpid();
    CHECK(worker != 0);
    const pid_t freezer = fork_child();
    if (freezer == 0) {
        ::poll(nullptr, 0, 1'500);
        ::kill(worker, SIGSTOP);
        ::kill(self, SIGSTOP);
        ::poll(nullptr, 0, 14'000);
        ::kill(self, SIGCONT);
        ::poll(nullptr, 0, 500);
        ::kill(worker, SIGCONT);
        ::_exit(0);
    }
    const Worker::Answer answer = rig.worker->wait(calls);
    CHECK(!answer.error && !answer.lost);
    CHECK(::waitpid(freezer, nullptr, 0) == freezer);
    rig.worker->stop();
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    who_waits_to_be_handed_memory_is_not_killed_when_the_one_before_has_ended();
    what_may_wait_behind_memory_that_moves_is_not_given_up();
    a_quick_call_behind_memory_that_stands_still_is_not_given_up();
    nothing_is_given_up_because_all_were_stopped();
}
