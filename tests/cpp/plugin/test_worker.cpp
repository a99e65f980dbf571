// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"
#include "worker_rig.hpp"

#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/worker.hpp"
#include "cuda_plugin/worker_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>

using namespace gpustasis;
using sample::Bystander;
using sample::find_worker;
using sample::Rig;
using sample::Slow;
using sample::Variable;

namespace {

constexpr int kDeathMs = 20'000; // what is to be killed is dead by then
constexpr int kLifeMs = 500;     // and what is not lives on for so long
bool slow_signals = false;

} // namespace

// Instead of the C library's: a criu that loses the processor just before its worker gets SIGKILL.
extern "C" long syscall(long number, ...) {
    va_list arguments;
    va_start(arguments, number);
    const long a = va_arg(arguments, long);
    const long b = va_arg(arguments, long);
    const long c = va_arg(arguments, long);
    const long d = va_arg(arguments, long);
    const long e = va_arg(arguments, long);
    va_end(arguments);
    if (slow_signals && number == SYS_pidfd_send_signal)
        ::usleep(9'000'000);
    register long r10 asm("r10") = d;
    register long r8 asm("r8") = e;
    long result = number;
    asm volatile("syscall"
                 : "+a"(result)
                 : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8)
                 : "rcx", "r11", "memory");
    if (result < 0) {
        errno = static_cast<int>(-result);
        return -1;
    }
    return result;
}

namespace {

// What a worker does with a driver is tested with the emulator; here it has none.
void a_missing_driver_is_an_error_that_names_it() {
    Rig rig(OnOrphaned::undo, "/nonexistent/libcuda.so.1");
    for (int again = 0; again < 2; ++again) {
        try {
            rig.worker->api_version();
            CHECK(false && "nothing was thrown");
        } catch (const Error& e) {
            CHECK(e.code() == Errc::unsupported);
            CHECK(std::string(e.what()).find(rig.config.driver) != std::string::npos);
        }
    }
    rig.worker->stop();
    rig.worker->stop(); // no worker is left to be stopped, and that is fine
}

void records_are_found_by_pid() {
    SharedTaskTable table(OnOrphaned::kill);
    CHECK(table->on_orphaned == OnOrphaned::kill);
    table.add(5).restore_tid = 6;
    table.add(7);
    CHECK(table.find(5)->restore_tid == 6 && table.find(7) != nullptr);
    CHECK(table.find(6) == nullptr);
}

/// A restore of `task`, by a criu that is gone without a word; the worker has done what it does then.
void orphan_a_restore(const RestoredTask& task, bool complete) {
    Rig rig(OnOrphaned::kill);
    CHECK(rig.worker->api_version() == 13000);
    rig.table->kills[0] = task;
    rig.table->kill_count = 1;
    rig.table->complete = complete;
    const pid_t worker = find_worker();
    CHECK(worker != 0);
    rig.worker.reset();
    CHECK(comes_true([&] { return ::waitpid(worker, nullptr, WNOHANG) == worker; }));
}

void an_orphaned_worker_kills_what_the_restore_made() {
    const Bystander task;
    orphan_a_restore({task.pid(), proc::start_time(task.pid())}, false);
    CHECK(task.dies_within(kDeathMs));
}

void a_task_that_has_got_the_pid_of_a_restored_one_is_left_alone() {
    const Bystander task;
    orphan_a_restore({task.pid(), proc::start_time(task.pid()) - 1}, false);
    CHECK(!task.dies_within(kLifeMs));
}

void a_complete_tree_is_left_alone() {
    const Bystander task;
    orphan_a_restore({task.pid(), proc::start_time(task.pid())}, true);
    CHECK(!task.dies_within(kLifeMs));
}

// The driver's answer comes between the deadline and the signal: the worker must not take the process
// that kills it for dead.
void a_worker_that_is_being_killed_does_nothing_on_its_own() {
    const Bystander task;
    Rig rig(OnOrphaned::kill);
    rig.table->kills[0] = {task.pid(), proc::start_time(task.pid())};
    rig.table->kill_count = 1;
    rig.config.driver_timeout_ms = 500;
    ::setenv("SLOW_DRIVER_CHECKPOINT_MS", "7000", 1);
    CHECK(rig.worker->api_version() == 13000); // it has begun, with swift signals of its own
    slow_signals = true;
    CHECK_THROWS(Errc::io, rig.worker->checkpoint(::getpid()));
    slow_signals = false;
    ::unsetenv("SLOW_DRIVER_CHECKPOINT_MS");
    rig.worker->stop();
    CHECK(!task.dies_within(kLifeMs));
}

// The worker waits for the driver when criu dies, and does not wait for it any longer.
void a_hanging_driver_does_not_keep_a_broken_restore_alive() {
    const Bystander task;
    const Slow slow("SLOW_DRIVER_CHECKPOINT_MS", "60000");
    const pid_t criu = fork_child();
    if (criu == 0) {
        Rig rig(OnOrphaned::kill);
        rig.table->kills[0] = {task.pid(), proc::start_time(task.pid())};
        rig.table->kill_count = 1;
        rig.worker->checkpoint(::getpid());
        ::_exit(0);
    }
    CHECK(comes_true([&] { return slow.is_in_it(); }));
    const pid_t worker = find_worker();
    CHECK(worker != 0);
    CHECK(::kill(criu, SIGKILL) == 0);
    CHECK(::waitpid(criu, nullptr, 0) == criu);
    CHECK(task.dies_within(kDeathMs));
    CHECK(::waitpid(worker, nullptr, 0) == worker);
}

// Whoever reads the record, a guardian or who looks at what a killed worker has left, must not take the
// task for one that is back.
void an_undo_is_settled_only_when_it_was_tried() {
    const Bystander task;
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Variable gated("SLOW_DRIVER_GATED", std::to_string(task.pid()));
    const Slow slow("SLOW_DRIVER_RESTORE_MS", "1", "2");
    Rig rig(OnOrphaned::undo);
    CHECK(rig.worker->state(task.pid()) == ProcessState::checkpointed);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    record.checkpoint_begun = true;
    const pid_t worker = find_worker();
    CHECK(worker != 0);
    rig.worker.reset();
    CHECK(comes_true([&] { return slow.is_in_it(); }));
    CHECK(!record.settled);
    sample::write_file(place.fd(), "gate", {});
    CHECK(::waitpid(worker, nullptr, 0) == worker);
    CHECK(record.settled);
}

// Who can write to the image directory must not be able to keep tasks locked.
void a_fifo_in_the_place_of_the_log_does_not_hold_up_an_undo() {
    const Bystander task;
    Rig rig(OnOrphaned::undo);
    CHECK(rig.worker->state(task.pid()) == ProcessState::running);
    TaskRecord& record = rig.table.add(task.pid());
    record.start_time = proc::start_time(task.pid());
    CHECK(::mkfifo(rig.images.path(kUndoLogName).c_str(), 0600) == 0);
    const pid_t worker = find_worker();
    CHECK(worker != 0);
    rig.worker.reset();
    CHECK(comes_true([&] { return record.settled.load(); }));
    CHECK(::waitpid(worker, nullptr, 0) == worker);
}

// cuInit has driver_timeout_ms, and what is asked meanwhile has its own time after it.
void quick_calls_wait_for_an_initialize_that_is_under_way() {
    Rig rig(OnOrphaned::kill);
    ::setenv("SLOW_DRIVER_INIT_MS", "21000", 1);
    rig.worker->begin_initialize({}, 0);
    CHECK(rig.worker->restore_thread(4242) == 4242);
    rig.worker->initialize();
    rig.worker->stop();

    rig.config.driver_timeout_ms = 100;
    rig.worker->begin_initialize({}, 0);
    CHECK_THROWS(Errc::io, rig.worker->restore_thread(4242));
    ::unsetenv("SLOW_DRIVER_INIT_MS");
    rig.worker->stop();
}

// Contexts and page-locked memory are made behind cuInit, and have as much time.
void an_initialize_with_gpus_has_twice_the_time() {
    Rig rig(OnOrphaned::kill);
    rig.config.driver_timeout_ms = 12'000;
    ::setenv("SLOW_DRIVER_INIT_MS", "18000", 1);
    rig.worker->begin_initialize({sample::id_of(1)}, 1); // which this driver does not have
    rig.worker->initialize();
    rig.worker->stop();
    rig.worker->begin_initialize({}, 0);
    CHECK_THROWS(Errc::io, rig.worker->initialize());
    ::unsetenv("SLOW_DRIVER_INIT_MS");
    rig.worker->stop();
}

void a_refused_initialize_is_told_to_who_needs_it() {
    Rig rig(OnOrphaned::kill);
    ::setenv("SLOW_DRIVER_INIT_RESULT", "100", 1);
    rig.worker->begin_initialize({}, 0);
    CHECK(rig.worker->restore_thread(4242) == 4242);
    CHECK_THROWS(Errc::io, rig.worker->initialize());
    ::unsetenv("SLOW_DRIVER_INIT_RESULT");
    rig.worker->stop();
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    a_missing_driver_is_an_error_that_names_it();
    records_are_found_by_pid();
    an_orphaned_worker_kills_what_the_restore_made();
    a_task_that_has_got_the_pid_of_a_restored_one_is_left_alone();
    a_complete_tree_is_left_alone();
    a_worker_that_is_being_killed_does_nothing_on_its_own();
    a_hanging_driver_does_not_keep_a_broken_restore_alive();
    an_undo_is_settled_only_when_it_was_tried();
    a_fifo_in_the_place_of_the_log_does_not_hold_up_an_undo();
    an_initialize_with_gpus_has_twice_the_time();
    a_refused_initialize_is_told_to_who_needs_it();
    quick_calls_wait_for_an_initialize_that_is_under_way();
}
