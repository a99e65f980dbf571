// SPDX-License-Identifier: Apache-2.0
// An orphaned worker, and what fails in the tasks that it is to bring back.
#include "undo_rig.hpp"

#include "core/image_writer.hpp"
#include "core/manifest.hpp"
#include "core/process_memory.hpp"
#include "core/random_id.hpp"

#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <string>

using namespace gpustasis;
using sample::await;
using sample::await_settled;
using sample::Bystander;
using sample::open_gate;
using sample::Orphaned;
using sample::Rig;
using sample::Variable;

namespace {

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

int count_of(const std::string& words, const std::string& text) {
    int count = 0;
    for (std::size_t at = 0; (at = text.find(words, at)) != std::string::npos; ++at)
        ++count;
    return count;
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
    CHECK(count_of("try gpustasis recover", orphan.log()) == 3);
    CHECK(count_of("until the others are brought back", orphan.log()) < 3); // the last one has none
}

std::string without(const std::string& words, std::string text) {
    for (std::size_t at = 0; (at = text.find(words, at)) != std::string::npos;)
        text.erase(at, words.size());
    return text;
}

// Nobody runs meanwhile.
void an_orphan_lets_others_wait_for_one_that_fails_at_first() {
    const Bystander tasks[3];
    const sample::TempDir place;
    const Variable gate("SLOW_DRIVER_GATE", place.path("gate"));
    const Variable refuses("SLOW_DRIVER_REFUSES_PID", std::to_string(tasks[0].pid()));
    const Variable refusals("SLOW_DRIVER_NOTES_REFUSALS", "1");
    const Orphaned orphan(tasks);
    const auto done = [&] { return without("refuse ", orphan.noted()); };
    CHECK(comes_true([&] { return done() == "restore restore "; }));
    // Not by time: after 10 s they wait no more.
    const int before = count_of("refuse ", orphan.noted());
    CHECK(comes_true([&] { return count_of("refuse ", orphan.noted()) >= before + 4; }));
    CHECK(done() == "restore restore ");
    open_gate(place.path("gate"));
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(done() == "restore restore restore unlock unlock unlock ");
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
    // Which of the three has the first turn depends on how long each takes.
    CHECK(noted.starts_with("restore restore restore ") && noted.ends_with(" unlock "));
    CHECK(count_of("restore ", noted) == 4 && count_of("relapse ", noted) == 1 &&
          count_of("unlock ", noted) == 3);
    CHECK(noted.rfind("restore ") > noted.find("relapse "));
    CHECK(orphan.log().find("recover") == std::string::npos);
}

// The same, of one that takes longer to restore than what fails is tried again.
void an_orphan_does_not_count_a_long_restore_as_an_unlock_that_fails() {
    const Bystander tasks[3];
    const Variable relapses("SLOW_DRIVER_RELAPSES", std::to_string(tasks[2].pid()));
    const Variable takes("SLOW_DRIVER_RELAPSE_MS", "11000");
    // One is left for which the worker waits: it would be told if this one was given up.
    CHECK(::kill(tasks[0].pid(), SIGSTOP) == 0);
    CHECK(comes_true([&] { return proc::state(tasks[0].pid()) == 'T'; }));
    Orphaned orphan(tasks);
    await_settled({&orphan.rig.table->tasks[2]});
    CHECK(!orphan.rig.table->tasks[0].settled);
    CHECK(::kill(tasks[0].pid(), SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    const std::string noted = orphan.noted();
    // Which of the three has the first turn depends on how long each takes.
    CHECK(count_of("relapse ", noted) == 2 && count_of("restore ", noted) == 5 &&
          count_of("unlock ", noted) == 3);
    CHECK(noted.rfind("restore ") > noted.rfind("relapse ") && noted.ends_with(" unlock "));
    CHECK(orphan.log().find("recover") == std::string::npos);
    CHECK(orphan.log().find("this is tried again") == std::string::npos);
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

// What always fails is tried again and again, and each time takes longer than the time between two looks.
void an_orphan_has_a_turn_for_one_that_does_not_fail() {
    const Variable slowly("SLOW_DRIVER_REFUSAL_MS", "300");
    for (const bool is_restored : {false, true}) { // of the second one its unlock fails
        const Bystander tasks[3];
        const std::string good = std::to_string(tasks[2].pid());
        const Variable unlocks("SLOW_DRIVER_UNLOCKS_ONLY", good);
        const Variable restores(is_restored ? "SLOW_DRIVER_REFUSES_PID"
                                            : "SLOW_DRIVER_RESTORES_ONLY",
                                is_restored ? std::to_string(tasks[0].pid()) : good);
        const Variable gate("SLOW_DRIVER_GATE", "/nonexistent");
        Orphaned orphan(tasks);
        const auto begin = std::chrono::steady_clock::now();
        if (!is_restored) { // nobody is given up before 10 s
            await([&] { return orphan.noted() == "restore "; });
            CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(8));
        }
        await_settled({&orphan.rig.table->tasks[2]});
        CHECK(orphan.noted() == (is_restored ? "restore restore unlock " : "restore unlock "));
        CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
        CHECK(orphan.log().find("try gpustasis recover") != std::string::npos);
    }
}

// Nor does it wait for one that is given up, and fails slowly, when it fails itself for once. That one is tried
// three times all the same.
void an_orphan_has_the_next_turn_for_one_that_has_failed_once() {
    const Bystander tasks[3];
    const Variable slowly("SLOW_DRIVER_REFUSAL_MS", "11000");
    const Variable refuses("SLOW_DRIVER_REFUSES_PID", std::to_string(tasks[0].pid()));
    const Variable gate("SLOW_DRIVER_GATE", "/nonexistent");
    const Variable relapses("SLOW_DRIVER_RELAPSES", std::to_string(tasks[2].pid()));
    const Variable refusals("SLOW_DRIVER_NOTES_REFUSALS", "1");
    Orphaned orphan(tasks);
    await([&] { return orphan.noted().find("relapse") != std::string::npos; });
    const auto begin = std::chrono::steady_clock::now();
    await_settled({&orphan.rig.table->tasks[2]});
    CHECK(std::chrono::steady_clock::now() - begin < std::chrono::seconds(9));
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(count_of("refuse ", orphan.noted()) >= 3);
}

// It is given up when criu lets go of the others, and these take each turn: then it has one more.
void an_orphan_tries_once_more_when_nobody_else_is_left() {
    const Bystander tasks[3];
    const Variable refuses("SLOW_DRIVER_REFUSES_PID", std::to_string(tasks[0].pid()));
    const Variable gate("SLOW_DRIVER_GATE", "/nonexistent");
    const Variable refusals("SLOW_DRIVER_NOTES_REFUSALS", "1");
    for (const pid_t pid : {tasks[1].pid(), tasks[2].pid()})
        CHECK(::ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) == 0);
    const Orphaned orphan(tasks, 60'000, "500");
    await([&] {
        return orphan.log().find("until the others are brought back") != std::string::npos;
    });
    const pid_t others[] = {tasks[1].pid(), tasks[2].pid()};
    for (const pid_t pid : others) {
        CHECK(::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr) == 0);
        CHECK(::waitpid(pid, nullptr, __WALL) == pid);
    }
    // At once for the worker, or the given-up one has its try between the two.
    CHECK(::kill(orphan.worker, SIGSTOP) == 0);
    CHECK(comes_true([&] { return proc::state(orphan.worker) == 'T'; }));
    for (const pid_t pid : others)
        CHECK(::ptrace(PTRACE_DETACH, pid, nullptr, nullptr) == 0);
    CHECK(::kill(orphan.worker, SIGCONT) == 0);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.noted().ends_with("unlock unlock refuse "));
    CHECK(orphan.log().find("try gpustasis recover") != std::string::npos);
}

/// Memory of this process and of each child that it makes then, and the image of it.
struct Image {
    static constexpr std::size_t kSize = std::size_t{256} << 10;
    Image() { std::memset(memory, 7, kSize); }
    Image(const Image&) = delete;
    Image& operator=(const Image&) = delete;
    ~Image() { ::munmap(memory, kSize); }
    /// As if the dump had dropped it, without a guardian.
    void drop(Rig& rig, TaskRecord& record) const {
        ImageInfo info;
        info.pid = record.image_pid = static_cast<std::uint32_t>(record.pid);
        info.start_time = record.start_time;
        info.boot_id = proc::boot_id();
        info.checkpoint_id = record.checkpoint_id = random_id();
        info.regions = {{reinterpret_cast<std::uint64_t>(memory), kSize, PROT_READ | PROT_WRITE,
                         RegionKind::private_anonymous}};
        ProcessMemory self(::getpid());
        record.digest = write_image(rig.images.fd(), image_name(info.pid), info, self, {}).digest;
        record.drop_begun = true;
    }
    std::byte* memory = static_cast<std::byte*>(
        ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
};

// The worker has put its memory back itself, and that is no reason to stay.
void an_orphan_gives_up_what_it_has_refilled() {
    const Image image;
    const Bystander tasks[3];
    const Variable refuses("SLOW_DRIVER_REFUSES", "1000000");
    Orphaned orphan(tasks, 60'000, "1", false,
                    [&](Rig& rig) { image.drop(rig, rig.table->tasks[0]); });
    await_settled({&orphan.rig.table->tasks[0]});
    CHECK(orphan.rig.table->tasks[0].refilled);
    CHECK(::waitpid(orphan.worker, nullptr, 0) == orphan.worker);
    CHECK(orphan.log().find("pid " + std::to_string(tasks[0].pid()) +
                            ": CUDA_ERROR_OPERATING_SYSTEM") != std::string::npos);
    CHECK(orphan.log().find("try gpustasis recover") != std::string::npos);
}

} // namespace

int main() {
    CHECK(::prctl(PR_SET_CHILD_SUBREAPER, 1) == 0);
    an_orphan_tries_again();
    an_orphan_gives_up_what_always_fails();
    an_orphan_lets_others_wait_for_one_that_fails_at_first();
    an_orphan_tries_what_fails_as_long_as_it_has_others_to_look_after();
    an_orphan_restores_again_what_is_checkpointed_when_it_is_to_be_unlocked();
    an_orphan_does_not_count_a_long_restore_as_an_unlock_that_fails();
    an_orphan_gives_up_what_can_never_be_unlocked();
    an_orphan_has_a_turn_for_one_that_does_not_fail();
    an_orphan_has_the_next_turn_for_one_that_has_failed_once();
    an_orphan_tries_once_more_when_nobody_else_is_left();
    an_orphan_gives_up_what_it_has_refilled();
}
