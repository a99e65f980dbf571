// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "other_thread.hpp"
#include "own_reads.hpp"

#include "core/error.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;
using proc::Liveness;

namespace {

/// From now on this process can open no file, because of `Error`. Not by a limit on descriptors: the
/// sanitizers need some of their own.
template <unsigned Error>
void refuse_to_open() {
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_openat, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | Error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{sizeof(code) / sizeof(code[0]), code};
    CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
    CHECK(::open("/proc/self/stat", 0) < 0 && errno == static_cast<int>(Error));
}

/// What a process that has lost the means to look says of the task.
Liveness look_without(void (*take)(), pid_t pid, std::uint64_t start_time) {
    const pid_t looking = fork_child();
    if (looking == 0) {
        take();
        ::_exit(static_cast<int>(proc::liveness(pid, start_time)));
    }
    int status = 0;
    CHECK(::waitpid(looking, &status, 0) == looking && WIFEXITED(status));
    return static_cast<Liveness>(WEXITSTATUS(status));
}

// Taken for dead, a task is not brought back, and its memory is let go of.
void who_cannot_look_takes_nobody_for_dead() {
    const pid_t task = fork_child();
    if (task == 0)
        for (;;)
            ::pause();
    const std::uint64_t start = proc::start_time(task);
    CHECK(proc::liveness(task, start) == Liveness::untraced);
    CHECK(proc::liveness(task, start + 1) == Liveness::dead); // another has its pid
    for (void (*take)() : {refuse_to_open<EMFILE>, refuse_to_open<ENOMEM>})
        CHECK(look_without(take, task, start) == Liveness::unknown);
    CHECK(::kill(task, SIGKILL) == 0);
    CHECK(::waitpid(task, nullptr, 0) == task);
    CHECK(proc::liveness(task, start) == Liveness::dead);
    for (void (*take)() : {refuse_to_open<EMFILE>, refuse_to_open<ENOMEM>})
        CHECK(look_without(take, task, start) == Liveness::dead);
}

/// A process whose first thread has ended while another lives on.
pid_t start_without_first_thread() {
    const pid_t task = fork_child();
    if (task != 0)
        return task;
    std::thread([] {
        for (;;)
            ::pause();
    }).detach();
    ::syscall(SYS_exit, 0); // of this thread alone, as at the end of pthread_exit()
    ::_exit(1);
}

void a_process_lives_on_in_any_of_its_threads() {
    const pid_t task = start_without_first_thread();
    const std::uint64_t start = proc::start_time(task);
    CHECK(comes_true([&] { return proc::state(task) == 'Z'; }));
    CHECK(proc::liveness(task, start) == Liveness::untraced);
    CHECK(proc::liveness(task, start + 1) == Liveness::dead);
    const pid_t other = other_thread(task);
    CHECK(::ptrace(PTRACE_SEIZE, other, nullptr, nullptr) == 0);
    CHECK(proc::liveness(task, start) == Liveness::traced);
    // Dead, the thread is there until we, its tracer, have waited for it.
    CHECK(::kill(task, SIGKILL) == 0);
    const std::vector<pid_t> both{std::min(task, other), std::max(task, other)};
    CHECK(comes_true([&] { return proc::threads(task) == both; }));
    CHECK(comes_true([&] { return proc::state(other) == 'Z'; }));
    CHECK(proc::liveness(task, start) == Liveness::dead);
    CHECK(::waitpid(other, nullptr, __WALL) == other);
    CHECK(::waitpid(task, nullptr, 0) == task);
    CHECK(proc::liveness(task, start) == Liveness::dead);
}

/// Of a process that has done `change` to itself.
std::string rights_after(void (*change)()) {
    std::array<int, 2> done{};
    CHECK(::pipe(done.data()) == 0);
    const pid_t task = fork_child();
    if (task == 0) {
        change();
        CHECK(::write(done[1], "x", 1) == 1);
        for (;;)
            ::pause();
    }
    char byte = 0;
    CHECK(::read(done[0], &byte, 1) == 1);
    std::string rights = proc::rights(task);
    CHECK(::kill(task, SIGKILL) == 0);
    CHECK(::waitpid(task, nullptr, 0) == task);
    ::close(done[0]);
    ::close(done[1]);
    return rights;
}

void who_may_do_less_has_other_rights() {
    const std::string own = proc::rights(::getpid());
    CHECK(rights_after([] {}) == own);
    CHECK(rights_after([] { CHECK(::setresuid(65534, 65534, 65534) == 0); }) != own);
    CHECK(rights_after([] { CHECK(::setresgid(65534, 65534, 65534) == 0); }) != own);
    CHECK(rights_after([] { CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0); }) != own);
    CHECK_THROWS(Errc::io, proc::rights(-1));
}

void trace(pid_t pid) {
    CHECK(::ptrace(PTRACE_SEIZE, pid, nullptr, nullptr) == 0);
    CHECK(::ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr) == 0);
    CHECK(::waitpid(pid, nullptr, __WALL) == pid);
}

std::vector<pid_t> pids_of(const std::vector<proc::Tracee>& tracees) {
    std::vector<pid_t> pids;
    std::ranges::transform(tracees, std::back_inserter(pids), &proc::Tracee::pid);
    std::ranges::sort(pids);
    return pids;
}

// A machine may have thousands.
void of_tasks_that_are_not_ours_no_file_is_read() {
    constexpr std::uint64_t kCrowd = 200;
    const Child crowd([] {
        for (std::uint64_t i = 0; i < kCrowd; ++i)
            if (fork_child() == 0)
                for (;;)
                    ::pause();
    });
    const Child task;
    trace(task.pid());
    const std::uint64_t before = own_reads("syscr");
    const std::vector<proc::Tracee> found = proc::tracees();
    const std::uint64_t reads = own_reads("syscr") - before;
    CHECK(reads < kCrowd / 4);
    CHECK(found.size() == 1 && found[0].pid == task.pid() && found[0].state == 't');
    CHECK(found[0].inner_pid == proc::innermost_pid(task.pid()));
    CHECK(proc::traced_by_us() == std::vector{task.pid()});
}

/// Has so many children, and tells their pids.
void with_children(int count, int out) {
    for (int i = 0; i < count; ++i) {
        const pid_t child = fork_child();
        if (child == 0)
            for (;;)
                ::pause();
        CHECK(::write(out, &child, sizeof child) == sizeof child);
    }
}

void a_tree_is_found_by_its_root_or_any_other_task() {
    for (const int count : {0, 2, 20}) {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        const Child root([&] { with_children(count, ends[1]); });
        const Child other; // of another tree
        std::vector<pid_t> tree{root.pid()};
        trace(root.pid());
        for (int i = 0; i < count; ++i) {
            pid_t child = 0;
            CHECK(::read(ends[0], &child, sizeof child) == sizeof child);
            trace(child);
            tree.push_back(child);
        }
        std::ranges::sort(tree);
        std::vector<pid_t> below = proc::tree(root.pid());
        CHECK(below.front() == root.pid());
        std::ranges::sort(below);
        CHECK(below == tree); // whoever traces them
        CHECK(proc::tree(other.pid()) == std::vector<pid_t>{other.pid()});
        for (const pid_t pid : tree)
            CHECK(pids_of(proc::tracees_below(pid)) == tree);
        CHECK(pids_of(proc::tracees()) == tree);
        CHECK(proc::tracees_below(other.pid()).empty());
        for (const pid_t pid : tree) // dead, each is there until its tracer has waited for it
            if (pid != root.pid())
                CHECK(::kill(pid, SIGKILL) == 0 && ::waitpid(pid, nullptr, __WALL) == pid);
        ::close(ends[0]);
        ::close(ends[1]);
    }
}

/// A thread that lives for a moment, and starts the next one before it ends.
void live_for_a_moment() {
    std::thread(live_for_a_moment).detach();
    ::usleep(200);
}

// Its threads come and go, the first of them has gone, and each that ends leaves the child to another one.
void a_tree_is_found_while_threads_end() {
    int ends[2];
    CHECK(::pipe(ends) == 0);
    const pid_t root = fork_child();
    CHECK(root >= 0);
    if (root == 0) {
        const pid_t child = ::fork();
        if (child == 0) {
            ::alarm(300); // whatever becomes of the test
            for (;;)
                ::pause();
        }
        CHECK(::write(ends[1], &child, sizeof child) == sizeof child);
        std::thread(live_for_a_moment).detach();
        ::syscall(SYS_exit, 0);
    }
    pid_t child = 0;
    CHECK(::read(ends[0], &child, sizeof child) == sizeof child);
    while (proc::state(root) != 'Z')
        ::usleep(1'000);
    for (int look = 0; look < 1'000; look += kStride)
        CHECK(proc::tree(root) == (std::vector<pid_t>{root, child}));
    CHECK(::kill(root, SIGKILL) == 0 && ::waitpid(root, nullptr, 0) == root);
    CHECK(::kill(child, SIGKILL) == 0);
    ::close(ends[0]);
    ::close(ends[1]);
}

// Children that have ended are waited for, the last one first, while the list of children is read from its begin: whoever
// stands behind them is found.
void a_tree_is_found_while_children_are_waited_for() {
    constexpr int kEnded = 64;
    for (int round = 0; round < 200; round += kStride) {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        const pid_t root = fork_child();
        CHECK(root >= 0);
        if (root == 0) {
            std::array<pid_t, kEnded> ended{};
            for (pid_t& pid : ended)
                if (pid = ::fork(); pid == 0)
                    ::_exit(0);
            const pid_t child = ::fork();
            if (child == 0) {
                ::alarm(300); // whatever becomes of the test
                for (;;)
                    ::pause();
            }
            siginfo_t info{};
            for (const pid_t pid : ended)
                CHECK(::waitid(P_PID, static_cast<id_t>(pid), &info, WEXITED | WNOWAIT) == 0);
            CHECK(::write(ends[1], &child, sizeof child) == sizeof child);
            for (auto pid = ended.rbegin(); pid != ended.rend(); ++pid)
                CHECK(::waitpid(*pid, nullptr, 0) == *pid);
            for (;;)
                ::pause();
        }
        pid_t child = 0;
        CHECK(::read(ends[0], &child, sizeof child) == sizeof child);
        for (int look = 0; look < 5; ++look)
            CHECK(std::ranges::count(proc::tree(root), child) == 1);
        CHECK(::kill(root, SIGKILL) == 0 && ::waitpid(root, nullptr, 0) == root);
        CHECK(::kill(child, SIGKILL) == 0);
        ::close(ends[0]);
        ::close(ends[1]);
    }
}

} // namespace

int main() {
    a_tree_is_found_while_children_are_waited_for();
    a_tree_is_found_while_threads_end();
    of_tasks_that_are_not_ours_no_file_is_read();
    a_tree_is_found_by_its_root_or_any_other_task();
    who_may_do_less_has_other_rights();
    who_cannot_look_takes_nobody_for_dead();
    a_process_lives_on_in_any_of_its_threads();
}
