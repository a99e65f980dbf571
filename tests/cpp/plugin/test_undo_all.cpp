// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"
#include "worker_rig.hpp"

#include "cuda_plugin/worker.hpp"
#include "tracee/proc.hpp"

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <fstream>
#include <string>
#include <vector>

using namespace gpustasis;
using sample::Bystander;
using sample::find_worker;
using sample::Rig;
using sample::Slow;
using sample::Variable;

namespace {

std::string read_lines(const std::string& path) {
    std::ifstream file(path);
    std::string text;
    for (std::string line; std::getline(file, line);)
        text += line + " ";
    return text;
}

void add_record(Rig& rig, pid_t pid) {
    TaskRecord& record = rig.table.add(pid);
    record.start_time = proc::start_time(pid);
    record.restore_tid = pid;
    record.lock_begun = record.checkpoint_begun = true;
}

/// Three tasks that an orphan is to restore and to unlock, with what it noted of that.
struct Orphaned {
    explicit Orphaned(const Bystander* tasks, std::uint32_t driver_timeout_ms = 60'000,
                      const char* restore_ms = "1", bool hangs = false)
        : slow("SLOW_DRIVER_RESTORE_MS", restore_ms, "2") {
        rig.config.driver_timeout_ms = driver_timeout_ms;
        CHECK(rig.worker->state(tasks[0].pid()) == ProcessState::checkpointed);
        for (int i = 0; i < 3; ++i)
            add_record(rig, tasks[i].pid());
        worker = find_worker();
        if (hangs) {
            rig.worker->begin_checkpoint(tasks[1].pid(), 0);
            CHECK(comes_true([&] { return slow.is_in_it(); }));
        }
        rig.worker.reset();
    }
    std::string log() const { return read_lines(rig.images.path("gpustasis-undo.log")); }
    std::string noted() const { return read_lines(place.path("notes")); }

    sample::TempDir place;
    const Variable moves{"SLOW_DRIVER_MOVES", "1"};
    const Variable notes{"SLOW_DRIVER_NOTES", place.path("notes")};
    const Slow slow;
    Rig rig{OnOrphaned::undo};
    pid_t worker = 0;
};

void await_settled(const std::vector<const TaskRecord*>& records) {
    const auto begin = std::chrono::steady_clock::now();
    while (
        !std::ranges::all_of(records, [](const TaskRecord* one) { return one->settled.load(); })) {
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(120));
        ::usleep(10'000);
    }
}

void open_gate(const std::string& path) {
    CHECK(std::ofstream(path) << "open" << std::flush);
}

// One may use memory of another as soon as it runs.
void an_orphan_restores_all_before_it_unlocks_any() {
    const Bystander tasks[3];
    Orphaned orphan(tasks);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
    for (std::size_t i = 0; i < orphan.rig.table->task_count; ++i)
        CHECK(orphan.rig.table->tasks[i].settled);
}

// criu is held for long before it lets go of the tasks, of one after the other.
void an_orphan_waits_for_whom_criu_has_not_let_go_of() {
    const Bystander tasks[3];
    for (const Bystander& task : tasks)
        CHECK(::ptrace(PTRACE_SEIZE, task.pid(), nullptr, nullptr) == 0);
    Orphaned orphan(tasks);
    const auto let_go = [](pid_t pid) {
        CHECK(::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr) == 0);
        CHECK(::waitpid(pid, nullptr, __WALL) == pid);
        CHECK(::ptrace(PTRACE_DETACH, pid, nullptr, nullptr) == 0);
    };
    ::sleep(11);
    let_go(tasks[0].pid());
    let_go(tasks[1].pid());
    CHECK(comes_true([&] { return orphan.noted() == "restore restore "; }));
    ::usleep(500'000);
    let_go(tasks[2].pid());
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
}

// One is stopped: the driver is asked nothing of it, and the others do not wait for it for ever.
void an_orphan_leaves_no_other_locked_because_of_one_that_is_stopped() {
    const Bystander tasks[3];
    CHECK(::kill(tasks[1].pid(), SIGSTOP) == 0);
    CHECK(comes_true([&] { return proc::state(tasks[1].pid()) == 'T'; }));
    Orphaned orphan(tasks);
    const TaskRecord* const records = &orphan.rig.table->tasks[0];
    await_settled({&records[0], &records[2]});
    CHECK(orphan.noted() == "restore restore unlock unlock ");
    CHECK(!records[1].settled);
    CHECK(::kill(tasks[1].pid(), SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore unlock unlock restore unlock ");
}

// The driver hangs in one: the others run on after its deadline, and it is said what is left.
void an_orphan_leaves_no_other_locked_because_the_driver_hangs_in_one() {
    for (const bool before : {false, true}) { // already when criu dies
        const Bystander tasks[3];
        const Variable hangs("SLOW_DRIVER_HANGS", std::to_string(tasks[1].pid()));
        Orphaned orphan(tasks, 1'000, "1", before);
        TaskRecord* const records = &orphan.rig.table->tasks[0];
        CHECK(comes_true([&] { return records[0].settled && records[2].settled; }));
        CHECK(orphan.noted() == "restore restore unlock unlock ");
        CHECK(!records[1].settled);
        const std::string said =
            "pid " + std::to_string(tasks[1].pid()) +
            ": the driver hangs in the task: it is brought back when that ends ";
        CHECK(comes_true([&] { return orphan.log().find(said) != std::string::npos; }));
        CHECK(::kill(tasks[1].pid(), SIGKILL) == 0);
        CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
        CHECK(orphan.noted() == "restore restore unlock unlock ");
        CHECK(records[1].settled);
    }
}

// The driver hangs when it is asked for a state, and criu is killed while it waits for that.
void an_orphan_undoes_while_the_driver_hangs_in_a_quick_call() {
    const Bystander tasks[3];
    const Variable mute("SLOW_DRIVER_MUTE", std::to_string(tasks[1].pid()));
    sample::TempDir place;
    const Variable moves("SLOW_DRIVER_MOVES", "1");
    const Variable notes("SLOW_DRIVER_NOTES", place.path("notes"));
    Slow slow("SLOW_DRIVER_RESTORE_MS", "1", "2");
    Rig rig(OnOrphaned::undo);
    for (const Bystander& task : tasks)
        add_record(rig, task.pid());
    int asks[2];
    CHECK(::pipe(asks) == 0);
    const pid_t criu = fork_child();
    if (criu == 0) {
        rig.worker->state(tasks[0].pid());
        CHECK(::write(asks[1], "", 1) == 1);
        rig.worker->state(tasks[1].pid());
        ::_exit(1);
    }
    char asked = 0;
    CHECK(::read(asks[0], &asked, 1) == 1);
    CHECK(comes_true([&] { return slow.is_in_it(); }));
    CHECK(::kill(criu, SIGKILL) == 0 && ::waitpid(criu, nullptr, 0) == criu);
    const TaskRecord* const records = &rig.table->tasks[0];
    CHECK(comes_true([] { return find_worker() != 0; }));
    const pid_t worker = find_worker();
    await_settled({&records[0], &records[2]}); // a quick call hangs after 20 s
    CHECK(!records[1].settled);
    CHECK(::kill(tasks[1].pid(), SIGKILL) == 0);
    CHECK(::waitpid(worker, nullptr, 0) == worker);
    CHECK(read_lines(place.path("notes")) == "restore restore unlock unlock ");
    ::close(asks[0]);
    ::close(asks[1]);
}

// Somebody else traces a thread for a moment, or a call of a worker that was killed is at its end.
void an_orphan_tries_again() {
    const Bystander tasks[3];
    const Variable refuses("SLOW_DRIVER_REFUSES", "2");
    const Variable refuses_unlocks("SLOW_DRIVER_REFUSES_UNLOCKS", "2");
    const Orphaned orphan(tasks);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
    CHECK(orphan.log().find("recover") == std::string::npos);
}

void an_orphan_gives_up_what_always_fails() {
    const Bystander tasks[3];
    const Variable refuses("SLOW_DRIVER_REFUSES", "1000000");
    const auto begin = std::chrono::steady_clock::now();
    const Orphaned orphan(tasks);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
    CHECK(orphan.noted().empty());
    CHECK(orphan.log().find("CUDA_ERROR_OPERATING_SYSTEM") != std::string::npos);
    CHECK(orphan.log().find("try gpustasis recover") != std::string::npos);
}

// Nobody runs meanwhile.
void an_orphan_lets_others_wait_for_one_that_fails_at_first() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Variable refuses("SLOW_DRIVER_REFUSES_PID", std::to_string(tasks[0].pid()));
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return orphan.noted() == "restore restore "; }));
    ::sleep(2);
    CHECK(orphan.noted() == "restore restore ");
    open_gate(place.path("gate"));
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
}

// It may be the other one, which is stopped, that it needs; and gpustasis recover waits for the worker.
void an_orphan_tries_what_fails_as_long_as_it_has_others_to_look_after() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Variable refuses("SLOW_DRIVER_REFUSES_PID", std::to_string(tasks[0].pid()));
    CHECK(::kill(tasks[1].pid(), SIGSTOP) == 0);
    CHECK(comes_true([&] { return proc::state(tasks[1].pid()) == 'T'; }));
    Orphaned orphan(tasks);
    const TaskRecord* const records = &orphan.rig.table->tasks[0];
    await_settled({&records[2]});
    const std::string said = "; this is tried again until the others are brought back ";
    CHECK(comes_true([&] { return orphan.log().find(said) != std::string::npos; }));
    CHECK(!records[0].settled && !records[1].settled);
    open_gate(place.path("gate"));
    await_settled({&records[0]});
    CHECK(!records[1].settled);
    CHECK(::kill(tasks[1].pid(), SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore unlock restore unlock restore unlock ");
    CHECK(orphan.log().find("try gpustasis recover") == std::string::npos);
}

// A call that criu had begun has ended behind the restore.
void an_orphan_restores_again_what_is_checkpointed_when_it_is_to_be_unlocked() {
    const Bystander tasks[3];
    const Variable relapses("SLOW_DRIVER_RELAPSES", std::to_string(tasks[1].pid()));
    const Orphaned orphan(tasks);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    const std::string noted = orphan.noted();
    CHECK(noted == "restore restore restore unlock relapse unlock restore unlock " ||
          noted == "restore restore restore unlock relapse restore unlock unlock ");
    CHECK(orphan.log().find("recover") == std::string::npos);
}

// The same, of one that takes longer to restore than what fails is tried again.
void an_orphan_does_not_count_a_long_restore_as_an_unlock_that_fails() {
    const Bystander tasks[3];
    const Variable relapses("SLOW_DRIVER_RELAPSES", std::to_string(tasks[2].pid()));
    const Variable takes("SLOW_DRIVER_RELAPSE_MS", "11000");
    const Orphaned orphan(tasks);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted().ends_with("relapse restore relapse restore unlock "));
    CHECK(orphan.log().find("recover") == std::string::npos);
}

// The last one runs on, and the worker comes to its end.
void an_orphan_gives_up_what_can_never_be_unlocked() {
    const Bystander tasks[3];
    const Variable only("SLOW_DRIVER_UNLOCKS_ONLY", std::to_string(tasks[2].pid()));
    Orphaned orphan(tasks);
    await_settled(
        {&orphan.rig.table->tasks[0], &orphan.rig.table->tasks[1], &orphan.rig.table->tasks[2]});
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock ");
    CHECK(orphan.log().find("try gpustasis recover") != std::string::npos);
}

// One dies while others are restored: the driver is asked nothing of whoever has its pid then.
void an_orphan_unlocks_none_that_has_died_meanwhile() {
    Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return orphan.noted() == "restore restore "; }));
    CHECK(::kill(tasks[0].pid(), SIGKILL) == 0);
    open_gate(place.path("gate"));
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock ");
    CHECK(orphan.log().find("recover") == std::string::npos);
}

// One is stopped while others are restored: the driver would wait for it.
void an_orphan_unlocks_none_that_is_stopped() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return orphan.noted() == "restore restore "; }));
    CHECK(::kill(tasks[0].pid(), SIGSTOP) == 0);
    CHECK(comes_true([&] { return proc::state(tasks[0].pid()) == 'T'; }));
    open_gate(place.path("gate"));
    CHECK(comes_true([&] { return orphan.noted() == "restore restore restore unlock unlock "; }));
    ::usleep(500'000);
    CHECK(orphan.noted() == "restore restore restore unlock unlock ");
    CHECK(::kill(tasks[0].pid(), SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
}

// Another dump has begun meanwhile: what it has seized is unlocked once it has let go.
void an_orphan_unlocks_none_that_is_traced() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return orphan.noted() == "restore restore "; }));
    CHECK(::ptrace(PTRACE_SEIZE, tasks[0].pid(), nullptr, nullptr) == 0);
    open_gate(place.path("gate"));
    ::sleep(8); // 10 s after criu has let go of the first nobody waits for it
    CHECK(comes_true([&] { return orphan.noted() == "restore restore restore unlock unlock "; }));
    ::usleep(200'000);
    CHECK(orphan.noted() == "restore restore restore unlock unlock ");
    CHECK(::ptrace(PTRACE_INTERRUPT, tasks[0].pid(), nullptr, nullptr) == 0);
    CHECK(::waitpid(tasks[0].pid(), nullptr, __WALL) == tasks[0].pid());
    CHECK(::ptrace(PTRACE_DETACH, tasks[0].pid(), nullptr, nullptr) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    an_orphan_restores_all_before_it_unlocks_any();
    an_orphan_waits_for_whom_criu_has_not_let_go_of();
    an_orphan_leaves_no_other_locked_because_of_one_that_is_stopped();
    an_orphan_leaves_no_other_locked_because_the_driver_hangs_in_one();
    an_orphan_undoes_while_the_driver_hangs_in_a_quick_call();
    an_orphan_tries_again();
    an_orphan_gives_up_what_always_fails();
    an_orphan_gives_up_what_can_never_be_unlocked();
    an_orphan_lets_others_wait_for_one_that_fails_at_first();
    an_orphan_tries_what_fails_as_long_as_it_has_others_to_look_after();
    an_orphan_restores_again_what_is_checkpointed_when_it_is_to_be_unlocked();
    an_orphan_does_not_count_a_long_restore_as_an_unlock_that_fails();
    an_orphan_unlocks_none_that_has_died_meanwhile();
    an_orphan_unlocks_none_that_is_stopped();
    an_orphan_unlocks_none_that_is_traced();
}
