// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "cuda_plugin/proc.hpp"
#include "cuda_plugin/side_by_side.hpp"
#include "cuda_plugin/worker.hpp"
#include "cuda_plugin/worker_process.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdarg>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <set>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

constexpr int kDeathMs = 2'000; // what is to be killed is dead by then
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
        ::usleep(400'000);
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

/// A worker and what it needs.
struct Rig {
    explicit Rig(OnOrphaned on_orphaned, std::string driver = SLOW_DRIVER)
        : table(on_orphaned),
          dir(::open(images.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)),
          lineage(dir.get()), undo_images(lineage) {
        config.driver = std::move(driver);
        config.nvml = "/nonexistent/libnvidia-ml.so.1";
        worker.emplace(config, table, undo_images);
    }
    Config config;
    SharedTaskTable table;
    sample::TempDir images;
    UniqueFd dir;
    Lineage lineage;
    UndoImages undo_images;
    std::optional<Worker> worker;
};

/// Ours by now: its parent has ended, and this process takes what is left behind. 0: none is there.
pid_t find_worker() {
    std::ifstream children("/proc/self/task/" + std::to_string(::getpid()) + "/children");
    for (pid_t pid = 0; children >> pid;)
        if (proc::comm(pid) == "gpustasis-work" && proc::state(pid) != 'Z')
            return pid;
    return 0;
}

/// For workers that are started meanwhile: the driver has a call that takes its time.
class Slow {
public:
    Slow(const char* variable, const char* milliseconds, const char* state = "0")
        : variable_(variable) {
        ::setenv(variable, milliseconds, 1);
        ::setenv("SLOW_DRIVER_STATE", state, 1);
        ::setenv("SLOW_DRIVER_MARK", dir_.path("mark").c_str(), 1);
    }
    Slow(const Slow&) = delete;
    Slow& operator=(const Slow&) = delete;
    ~Slow() {
        for (const char* name : {variable_, "SLOW_DRIVER_STATE", "SLOW_DRIVER_MARK"})
            ::unsetenv(name);
    }
    /// Whether that call has begun.
    bool is_in_it() const { return ::access(dir_.path("mark").c_str(), F_OK) == 0; }

private:
    sample::TempDir dir_;
    const char* variable_;
};

/// A process that does nothing until it is killed.
class Bystander : public Child {
public:
    bool dies_within(int milliseconds) const {
        for (int waited = 0; waited <= milliseconds; ++waited) {
            siginfo_t info{};
            if (::waitid(P_PID, static_cast<id_t>(pid()), &info, WEXITED | WNOHANG | WNOWAIT) ==
                    0 &&
                info.si_pid == pid())
                return true;
            ::poll(nullptr, 0, 1);
        }
        return false;
    }
};

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
    CHECK(!task.dies_within(kDeathMs / 4));
}

void a_complete_tree_is_left_alone() {
    const Bystander task;
    orphan_a_restore({task.pid(), proc::start_time(task.pid())}, true);
    CHECK(!task.dies_within(kDeathMs / 4));
}

// The driver's answer comes between the deadline and the signal: the worker must not take the process
// that kills it for dead.
void a_worker_that_is_being_killed_does_nothing_on_its_own() {
    const Bystander task;
    Rig rig(OnOrphaned::kill);
    rig.table->kills[0] = {task.pid(), proc::start_time(task.pid())};
    rig.table->kill_count = 1;
    rig.config.driver_timeout_ms = 100;
    ::setenv("SLOW_DRIVER_CHECKPOINT_MS", "200", 1);
    CHECK(rig.worker->api_version() == 13000); // it has begun, with swift signals of its own
    slow_signals = true;
    CHECK_THROWS(Errc::io, rig.worker->checkpoint(::getpid()));
    slow_signals = false;
    ::unsetenv("SLOW_DRIVER_CHECKPOINT_MS");
    rig.worker->stop();
    CHECK(!task.dies_within(kDeathMs / 4));
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
    const Slow slow("SLOW_DRIVER_RESTORE_MS", "3000", "2");
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
    rig.worker->begin_initialize();
    CHECK(rig.worker->restore_thread(4242) == 4242);
    rig.worker->initialize();
    rig.worker->stop();

    rig.config.driver_timeout_ms = 100;
    rig.worker->begin_initialize();
    CHECK_THROWS(Errc::io, rig.worker->restore_thread(4242));
    ::unsetenv("SLOW_DRIVER_INIT_MS");
    rig.worker->stop();
}

void a_refused_initialize_is_told_to_who_needs_it() {
    Rig rig(OnOrphaned::kill);
    ::setenv("SLOW_DRIVER_INIT_RESULT", "100", 1);
    rig.worker->begin_initialize();
    CHECK(rig.worker->restore_thread(4242) == 4242);
    CHECK_THROWS(Errc::io, rig.worker->initialize());
    ::unsetenv("SLOW_DRIVER_INIT_RESULT");
    rig.worker->stop();
}

/// A variable of the driver's, for workers that are started meanwhile.
class Variable {
public:
    Variable(const char* name, const std::string& value) : name_(name) {
        ::setenv(name, value.c_str(), 1);
    }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;
    ~Variable() { ::unsetenv(name_); }

private:
    const char* name_;
};

void calls_are_made_side_by_side() {
    const Variable meet("SLOW_DRIVER_MEET", "3");
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
    CHECK_THROWS(Errc::io, side_by_side(
                               *rig.worker, 8, {.limit = 3, .memory = {}, .room = {}},
                               [&](std::size_t i) -> std::optional<Worker::Call> {
                                   if (i == 2)
                                       throw Error(Errc::io, "this one cannot");
                                   ++begun;
                                   return rig.worker->begin_checkpoint(static_cast<int>(i) + 1, 0);
                               },
                               [&](const CallsUnderWay::Answer&) { ++done; }, [&] { ++failed; }));
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
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "1500");
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

void who_dies_has_lost_all_calls() {
    const Variable slow("SLOW_DRIVER_CHECKPOINT_MS", "60000");
    Rig rig(OnOrphaned::undo);
    std::vector<Worker::Call> calls{rig.worker->begin_checkpoint(7, 0),
                                    rig.worker->begin_checkpoint(8, 0)};
    const pid_t worker = find_worker();
    CHECK(worker != 0 && ::kill(worker, SIGKILL) == 0);
    while (!calls.empty()) {
        const Worker::Answer answer = rig.worker->wait(calls);
        CHECK(answer.error && answer.lost);
        calls.erase(calls.begin() + static_cast<std::ptrdiff_t>(answer.index));
    }
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
    a_missing_driver_is_an_error_that_names_it();
    records_are_found_by_pid();
    an_orphaned_worker_kills_what_the_restore_made();
    a_task_that_has_got_the_pid_of_a_restored_one_is_left_alone();
    a_complete_tree_is_left_alone();
    a_worker_that_is_being_killed_does_nothing_on_its_own();
    a_hanging_driver_does_not_keep_a_broken_restore_alive();
    an_undo_is_settled_only_when_it_was_tried();
    a_fifo_in_the_place_of_the_log_does_not_hold_up_an_undo();
    a_refused_initialize_is_told_to_who_needs_it();
    quick_calls_wait_for_an_initialize_that_is_under_way();
    calls_are_made_side_by_side();
    no_more_calls_are_made_at_once_than_are_wanted();
    after_a_failure_none_is_begun_and_all_are_waited_for();
    what_memory_has_no_room_for_at_once_is_done_in_turn();
    who_gives_one_call_up_waits_for_the_others();
    who_dies_has_lost_all_calls();
    a_call_is_given_up_when_its_own_task_dies();
    an_orphan_undoes_when_its_calls_have_ended();
    both_halves_of_an_undo_are_done_by_the_worker();
    a_way_back_that_was_not_taken_is_an_error();
}
