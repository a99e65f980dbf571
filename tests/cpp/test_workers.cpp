// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "core/workers.hpp"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <set>
#include <thread>

using namespace gpustasis;

namespace {

void there_are_never_more_threads_than_jobs() {
    CHECK(worker_count(8, 3) == 3);
    CHECK(worker_count(8, 100) == 8);
    CHECK(worker_count(8, 0) == 1);
    CHECK(worker_count(0, 1U << 20) >= 1);
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(::sched_getcpu(), &one);
    std::jthread([&] {
        CHECK(::sched_setaffinity(0, sizeof one, &one) == 0);
        CHECK(worker_count(0, 1U << 20) == 1);
    });
}

void all_have_returned_and_the_first_failure_is_thrown() {
    FirstFailure failure;
    std::atomic<unsigned> started = 0;
    std::atomic<unsigned> returned = 0;
    const auto work = [&] {
        const unsigned number = started++;
        if (number == 2)
            throw Error(Errc::corrupt_data, "the third");
        while (!failure.any())
            std::this_thread::yield();
        ++returned;
        throw Error(Errc::io, "a later one");
    };
    CHECK_THROWS(Errc::corrupt_data, run_workers(4, failure, work));
    CHECK(started == 4);
    CHECK(returned == 3);
}

// A signal to the process must go to the thread that waits for it, not to a worker.
void other_threads_block_signals_and_the_caller_keeps_its_mask() {
    FirstFailure failure;
    const auto caller = std::this_thread::get_id();
    sigset_t before;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &before);
    std::atomic<unsigned> arrived = 0;
    run_workers(4, failure, [&] {
        sigset_t mask;
        ::pthread_sigmask(SIG_SETMASK, nullptr, &mask);
        const bool blocked = std::this_thread::get_id() != caller;
        for (const int signal : {SIGINT, SIGTERM, SIGCHLD, SIGALRM, SIGUSR1})
            CHECK((::sigismember(&mask, signal) == 1) == blocked);
        ++arrived;
        while (arrived != 4)
            std::this_thread::yield();
    });
    sigset_t after;
    ::pthread_sigmask(SIG_SETMASK, nullptr, &after);
    CHECK(::sigismember(&before, SIGINT) == ::sigismember(&after, SIGINT));
}

// With no process left to the user no thread can be started: the caller does all the work.
void fewer_threads_than_asked_for_do_all_the_work() {
    const pid_t child = fork_child();
    if (child == 0) {
        const rlimit none{0, 0};
        CHECK(::setrlimit(RLIMIT_NPROC, &none) == 0);
        constexpr uid_t kNobody = 65534; // the limit does not bind root
        CHECK(::geteuid() != 0 || ::setresuid(kNobody, kNobody, kNobody) == 0);
        FirstFailure failure;
        std::atomic<int> jobs = 100;
        std::set<std::thread::id> seen; // no lock: there must be one thread
        run_workers(8, failure, [&] {
            while (jobs-- > 0)
                seen.insert(std::this_thread::get_id());
        });
        ::_exit(jobs < 0 && seen == std::set{std::this_thread::get_id()} ? 0 : 1);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
}

} // namespace

int main() {
    there_are_never_more_threads_than_jobs();
    all_have_returned_and_the_first_failure_is_thrown();
    other_threads_block_signals_and_the_caller_keeps_its_mask();
    fewer_threads_than_asked_for_do_all_the_work();
}
