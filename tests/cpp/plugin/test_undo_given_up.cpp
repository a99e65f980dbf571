// SPDX-License-Identifier: Apache-2.0
// Tasks that an orphaned worker has given up, beside each other and beside those that it waits for.
#include "undo_rig.hpp"

#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>

#include <chrono>
#include <csignal>
#include <ctime>
#include <string>

using namespace gpustasis;
using namespace sample;

namespace {

using Clock = std::chrono::steady_clock;

const std::string kRecover = "try gpustasis recover";
const std::string kBehindOthers = "until the others are brought back";

std::size_t count_of(const std::string& what, const std::string& text) {
    std::size_t count = 0;
    for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1))
        ++count;
    return count;
}

void stop(const Bystander& task) {
    CHECK(::kill(task.pid(), SIGSTOP) == 0);
    CHECK(comes_true([&] { return proc::state(task.pid()) == 'T'; }));
}

/// Seconds since the driver noted something last.
double silent_s(const Orphaned& orphan) {
    struct stat found {};
    CHECK(::stat(orphan.place.path("notes").c_str(), &found) == 0);
    timespec now{};
    CHECK(::clock_gettime(CLOCK_REALTIME, &now) == 0);
    return static_cast<double>(now.tv_sec - found.st_mtim.tv_sec) +
           static_cast<double>(now.tv_nsec - found.st_mtim.tv_nsec) / 1e9;
}

// The one that it waits for dies during its try: that was none with nobody left.
void one_that_is_tried_when_the_last_other_one_goes_is_tried_again() {
    Bystander tasks[3];
    const sample::TempDir place;
    const Variable hold("SLOW_DRIVER_HOLD", place.path("hold"));
    const Variable refuses("SLOW_DRIVER_REFUSES_ALWAYS", std::to_string(tasks[0].pid()));
    const Variable refusals("SLOW_DRIVER_NOTES_REFUSALS", "1");
    stop(tasks[1]);
    Orphaned orphan(tasks);
    await([&] { return orphan.log().find(kBehindOthers) != std::string::npos; });
    sample::write_file(place.fd(), "hold", {});
    await([&] { return count_of("held ", orphan.noted()) == 1; }); // this try does not end
    const std::size_t begun = count_of("refuse ", orphan.noted());
    tasks[1].end();
    await_settled({&orphan.rig.table->tasks[1]});
    CHECK(::unlink(place.path("hold").c_str()) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(count_of("refuse ", orphan.noted()) == begun + 1);
    CHECK(count_of(kRecover, orphan.log()) == 1);
}

// The last try of the one may free what the other needs.
void none_is_settled_during_the_last_try_of_another_one() {
    const Bystander tasks[3];
    const Variable slowly("SLOW_DRIVER_REFUSAL_MS", "3000");
    const Variable restores("SLOW_DRIVER_RESTORES_ONLY", std::to_string(tasks[2].pid()));
    const Variable refusals("SLOW_DRIVER_NOTES_REFUSALS", "1");
    const Orphaned orphan(tasks);
    for (const std::size_t told : {std::size_t{1}, std::size_t{2}}) {
        await([&] { return count_of(kRecover, orphan.log()) >= told; });
        CHECK(silent_s(orphan) > 2.9);
    }
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
}

// Nobody tells when that ends, and gpustasis recover would wait for the worker.
void one_in_which_the_driver_hangs_is_another_one_that_is_left() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable hangs("SLOW_DRIVER_HANGS_LATER", std::to_string(tasks[1].pid()));
    const Variable restores("SLOW_DRIVER_RESTORES_ONLY", std::to_string(tasks[2].pid()));
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    stop(tasks[2]);
    Orphaned orphan(tasks, 5'000); // the other one's calls are not taken for ones that hang
    await([&] { return count_of(kBehindOthers, orphan.log()) == 2; });
    open_gate(place.path("gate"));
    const std::string said =
        "pid " + std::to_string(tasks[1].pid()) + ": the driver hangs in the task";
    await([&] { return orphan.log().find(said) != std::string::npos; });
    CHECK(::kill(tasks[2].pid(), SIGCONT) == 0);
    await_settled({&orphan.rig.table->tasks[2]});
    ::sleep(3);
    CHECK(orphan.log().find(kRecover) == std::string::npos);
    CHECK(!orphan.rig.table->tasks[0].settled);
    CHECK(::kill(orphan.worker, SIGKILL) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
}

// Nor does it keep the worker for ever; but what hangs may come back, and free another one.
void one_in_which_the_driver_answers_late_each_time_is_given_up() {
    const Bystander tasks[3];
    const Variable slowly("SLOW_DRIVER_REFUSAL_MS", "3000");
    const Variable restores("SLOW_DRIVER_RESTORES_ONLY", std::to_string(tasks[2].pid()));
    const Variable refusals("SLOW_DRIVER_NOTES_REFUSALS", "1");
    const Orphaned orphan(tasks, 1'000);
    for (const std::size_t told : {std::size_t{1}, std::size_t{2}}) {
        await([&] { return count_of(kRecover, orphan.log()) >= told; });
        CHECK(silent_s(orphan) > 2.9);
    }
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(count_of(kRecover, orphan.log()) == 2);
}

// It does not wait for one more try of what always fails.
void one_that_comes_back_at_last_has_the_next_turn() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable slowly("SLOW_DRIVER_REFUSAL_MS", "6000");
    const Variable refuses("SLOW_DRIVER_REFUSES_ALWAYS", std::to_string(tasks[1].pid()));
    const Variable at_first("SLOW_DRIVER_REFUSES_PID", std::to_string(tasks[0].pid()));
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    stop(tasks[2]);
    Orphaned orphan(tasks);
    await([&] { return count_of(kBehindOthers, orphan.log()) == 2; });
    open_gate(place.path("gate"));
    await([&] { return orphan.noted().starts_with("restore "); });
    const auto begin = Clock::now();
    await_settled({&orphan.rig.table->tasks[0]});
    CHECK(Clock::now() - begin < std::chrono::seconds(4));
    CHECK(::kill(tasks[2].pid(), SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(count_of(kRecover, orphan.log()) == 1);
}

// As by the freezer of its control group: the driver had no time either.
void one_in_which_the_driver_is_at_work_does_not_hang_because_the_worker_was_stopped() {
    const Bystander tasks[3];
    const Orphaned orphan(tasks, 9'000, "4000");
    ::sleep(1);
    CHECK(::kill(orphan.worker, SIGSTOP) == 0);
    ::sleep(9);
    CHECK(::kill(orphan.worker, SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(count_of("restore ", orphan.noted()) == 3 && count_of("unlock ", orphan.noted()) == 3);
    CHECK(orphan.log().find("the driver hangs in the task") == std::string::npos);
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    one_that_is_tried_when_the_last_other_one_goes_is_tried_again();
    none_is_settled_during_the_last_try_of_another_one();
    one_in_which_the_driver_hangs_is_another_one_that_is_left();
    one_in_which_the_driver_answers_late_each_time_is_given_up();
    one_that_comes_back_at_last_has_the_next_turn();
    one_in_which_the_driver_is_at_work_does_not_hang_because_the_worker_was_stopped();
}
