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

#include <chrono>
#include <csignal>
#include <cstddef>
#include <fstream>
#include <string>

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

/// Three tasks that an orphan is to restore and to unlock, with what it noted of that.
struct Orphaned {
    explicit Orphaned(const Bystander* tasks) {
        CHECK(rig.worker->state(tasks[0].pid()) == ProcessState::checkpointed);
        for (int i = 0; i < 3; ++i) {
            TaskRecord& record = rig.table.add(tasks[i].pid());
            record.start_time = proc::start_time(tasks[i].pid());
            record.restore_tid = tasks[i].pid();
            record.lock_begun = record.checkpoint_begun = true;
        }
        worker = find_worker();
        rig.worker.reset();
    }
    std::string noted() const { return read_lines(place.path("notes")); }

    sample::TempDir place;
    const Variable moves{"SLOW_DRIVER_MOVES", "1"};
    const Variable notes{"SLOW_DRIVER_NOTES", place.path("notes")};
    const Slow slow{"SLOW_DRIVER_RESTORE_MS", "1", "2"};
    Rig rig{OnOrphaned::undo};
    pid_t worker = 0;
};

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
    const auto begin = std::chrono::steady_clock::now();
    while (!(records[0].settled && records[2].settled)) {
        CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(60));
        ::usleep(10'000);
    }
    CHECK(orphan.noted() == "restore restore unlock unlock ");
    CHECK(!records[1].settled);
    CHECK(::kill(tasks[1].pid(), SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted() == "restore restore unlock unlock restore unlock ");
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    an_orphan_restores_all_before_it_unlocks_any();
    an_orphan_waits_for_whom_criu_has_not_let_go_of();
    an_orphan_leaves_no_other_locked_because_of_one_that_is_stopped();
}
