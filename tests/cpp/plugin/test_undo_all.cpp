// SPDX-License-Identifier: Apache-2.0
#include "undo_rig.hpp"

#include "dropped_memory/drop_record.hpp"
#include "tracee/task_identity.hpp"

#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <string>

using namespace gpustasis;
using sample::add_record;
using sample::await;
using sample::await_settled;
using sample::Bystander;
using sample::find_worker;
using sample::open_gate;
using sample::Orphaned;
using sample::read_lines;
using sample::Rig;
using sample::Slow;
using sample::Variable;

namespace {

// One may use memory of another as soon as it runs.
void an_orphan_restores_all_before_it_unlocks_any() {
    const Bystander tasks[3];
    Orphaned orphan(tasks);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock unlock ");
    for (std::size_t i = 0; i < orphan.rig.table->task_count; ++i)
        CHECK(orphan.rig.table->tasks[i].settled);
}

// A new dump may have checkpointed the task since it was unlocked: recover needs the record of that one.
void an_orphan_removes_no_record_of_another_dump() {
    const Bystander tasks[3];
    DropRecords records({}, DropRecords::kCheckpointed);
    for (std::uint8_t i = 0; i < 3; ++i) {
        DropRecord record;
        record.task = identify_task(tasks[i].pid());
        record.pid = tasks[i].pid();
        record.seen_from = pid_namespace_of("self");
        record.boot_id = proc::boot_id();
        record.checkpoint_id[0] = std::byte{i};
        records.write(record);
    }
    Orphaned orphan(tasks, 60'000, "1", false,
                    [](Rig& rig) { // of a task, the record is another dump's
                        for (std::size_t i = 0; i < rig.table->task_count; ++i) {
                            TaskRecord& task = rig.table->tasks[i];
                            const TaskIdentity identity = identify_task(task.pid);
                            task.pid_namespace = identity.pid_namespace;
                            task.image_pid = identity.inner_pid;
                            task.checkpoint_id[0] =
                                std::byte{i == 1 ? std::uint8_t{7} : static_cast<std::uint8_t>(i)};
                        }
                    });
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(!records.find(identify_task(tasks[0].pid())));
    CHECK(records.find(identify_task(tasks[1].pid())));
    CHECK(!records.find(identify_task(tasks[2].pid())));
    records.remove(identify_task(tasks[1].pid()));
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
        // Long enough for the others, whose calls must not be taken for ones that hang.
        Orphaned orphan(tasks, 10'000, "1", before);
        TaskRecord* const records = &orphan.rig.table->tasks[0];
        await_settled({&records[0], &records[2]});
        CHECK(orphan.noted() == "restore restore unlock unlock ");
        CHECK(!records[1].settled);
        const std::string said =
            "pid " + std::to_string(tasks[1].pid()) +
            ": the driver hangs in the task: it is brought back when that ends ";
        await([&] { return orphan.log().find(said) != std::string::npos; });
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

// One dies while others are restored: the driver is asked nothing of whoever has its pid then.
void an_orphan_unlocks_none_that_has_died_meanwhile() {
    Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Variable gated("SLOW_DRIVER_GATED", std::to_string(tasks[2].pid()));
    const Variable last("SLOW_DRIVER_GATED_AFTER", "2"); // whichever is tried first
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return place.has("gate.reached"); }));
    CHECK(orphan.noted() == "restore restore ");
    tasks[0].end(); // and until it has ended
    open_gate(place.path("gate"));
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore restore unlock unlock ");
    CHECK(orphan.log().find("recover") == std::string::npos);
}

// The driver may never answer for it.
void an_orphan_does_not_wait_for_the_call_in_one_that_dies() {
    Bystander tasks[3];
    const Variable hangs("SLOW_DRIVER_HANGS", std::to_string(tasks[0].pid()));
    const Orphaned orphan(tasks, 60'000, "0"); // only the call that hangs makes the mark
    CHECK(comes_true([&] { return orphan.slow.is_in_it(); }));
    const auto begin = std::chrono::steady_clock::now();
    tasks[0].end();
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(30)); // 60 is the limit
    CHECK(orphan.noted() == "restore restore unlock unlock ");
}

// One is stopped while others are restored: the driver would wait for it.
void an_orphan_unlocks_none_that_is_stopped() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Variable gated("SLOW_DRIVER_GATED", std::to_string(tasks[2].pid()));
    const Variable last("SLOW_DRIVER_GATED_AFTER", "2"); // whichever is tried first
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return place.has("gate.reached"); }));
    CHECK(orphan.noted() == "restore restore ");
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
    const Variable gated("SLOW_DRIVER_GATED", std::to_string(tasks[2].pid()));
    const Variable last("SLOW_DRIVER_GATED_AFTER", "2"); // whichever is tried first
    const Orphaned orphan(tasks);
    CHECK(comes_true([&] { return place.has("gate.reached"); }));
    CHECK(orphan.noted() == "restore restore ");
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
    an_orphan_removes_no_record_of_another_dump();
    an_orphan_waits_for_whom_criu_has_not_let_go_of();
    an_orphan_leaves_no_other_locked_because_of_one_that_is_stopped();
    an_orphan_leaves_no_other_locked_because_the_driver_hangs_in_one();
    an_orphan_undoes_while_the_driver_hangs_in_a_quick_call();
    an_orphan_unlocks_none_that_has_died_meanwhile();
    an_orphan_does_not_wait_for_the_call_in_one_that_dies();
    an_orphan_unlocks_none_that_is_stopped();
    an_orphan_unlocks_none_that_is_traced();
}
