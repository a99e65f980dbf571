// SPDX-License-Identifier: Apache-2.0
// Whether another tracer is at work in a process: its threads are seized for that, of which they notice nothing.
#include "check.hpp"
#include "child.hpp"
#include "other_thread.hpp"

#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"

#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <thread>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::chrono::seconds kStop{10};
constexpr uid_t kUser = 65534;

constexpr const char* kName = "waits";

void start_thread() {
    std::thread([] {
        ::prctl(PR_SET_NAME, kName);
        for (;;)
            ::pause();
    }).detach();
}

void start_threads_for_ever() {
    for (int i = 0; i < 4; ++i)
        std::thread([] {
            for (;;)
                std::thread([] {}).join();
        }).detach();
}

// The caller has stopped one of its threads meanwhile.
void a_process_that_starts_threads_for_ever_is_not_waited_for() {
    const Child target(start_threads_for_ever);
    ::alarm(60); // ends the test
    for (int round = 0; round < 20; ++round)
        static_cast<void>(others_are_traced(target.pid(), target.pid()));
    ::alarm(0);
}

void run_another_program(int /*signal*/) {
    ::execl("/bin/sleep", "sleep", "600", nullptr);
    ::_exit(1);
}

void start_two_threads() {
    ::signal(SIGUSR1, run_another_program);
    start_thread();
    start_thread();
}

// It waits for all of its other threads to end, also for those that a tracer has.
void a_process_that_executes_another_program_is_not_held_up() {
    const Child target(start_two_threads);
    std::vector<pid_t> tids; // a sanitizer may have a thread there as well
    CHECK(comes_true([&] {
        tids = proc::threads(target.pid());
        std::erase_if(tids, [](pid_t tid) { return proc::comm(tid) != kName; });
        return tids.size() == 2;
    }));
    ::alarm(60); // ends the test
    {
        std::thread tracer([&] {
            const SeizedThread seized(tids[0], kStop);
            CHECK(::syscall(SYS_tgkill, target.pid(), tids[1], SIGUSR1) == 0);
            CHECK(comes_true([&] { return proc::state(tids[0]) == 'Z'; }));
            try {
                static_cast<void>(others_are_traced(target.pid(), tids[0]));
            } catch (const Error&) { // NOLINT(bugprone-empty-catch): they end meanwhile
            }
        });
        tracer.join();
    }
    CHECK(comes_true([&] { return proc::comm(target.pid()) == "sleep"; }));
    ::alarm(0);
}

void all_are_let_go_of_at_once() {
    const Child target(start_thread);
    const pid_t second = other_thread(target.pid());
    for (int round = 0; round < 5000; ++round) {
        CHECK(!others_are_traced(target.pid(), target.pid()));
        const SeizedThread seized(second, kStop);
    }
}

void a_stopped_process_stays_stopped() {
    const Child target(start_thread);
    CHECK(::kill(target.pid(), SIGSTOP) == 0);
    const pid_t second = other_thread(target.pid());
    CHECK(comes_true([=] { return proc::state(second) == 'T'; }));
    CHECK(!others_are_traced(target.pid(), target.pid()));
    CHECK(comes_true([=] { return proc::state(second) == 'T'; }));
    CHECK(::kill(target.pid(), SIGCONT) == 0);
    CHECK(comes_true([=] { return proc::state(second) == 'S'; }));
}

// As where a limit on threads is reached.
void without_a_thread_for_it_nobody_can_tell() {
    if (::geteuid() == 0)
        become(kUser); // no limit applies to root
    const Child target(start_thread);
    rlimit before{};
    CHECK(::getrlimit(RLIMIT_NPROC, &before) == 0);
    const rlimit none{.rlim_cur = 0, .rlim_max = before.rlim_max};
    CHECK(::setrlimit(RLIMIT_NPROC, &none) == 0);
    CHECK_THROWS(Errc::io, others_are_traced(target.pid(), target.pid()));
    CHECK(::setrlimit(RLIMIT_NPROC, &before) == 0); // a sanitizer needs a process at the end
}

} // namespace

int main() {
    a_process_that_starts_threads_for_ever_is_not_waited_for();
    a_process_that_executes_another_program_is_not_held_up();
    all_are_let_go_of_at_once();
    a_stopped_process_stays_stopped();
    without_a_thread_for_it_nobody_can_tell();
}
