// SPDX-License-Identifier: Apache-2.0
// This program is its own criu: its calls of ptrace are those that the plugin changes.
#include "check.hpp"

#include "cuda_plugin/exit_kill.hpp"

#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <optional>
#include <vector>

using namespace gpustasis;

namespace {

/// A process that answers each byte with a byte, as long as it lives.
class Answering {
public:
    Answering() {
        int questions[2];
        int answers[2];
        CHECK(::pipe(questions) == 0 && ::pipe(answers) == 0);
        pid_ = fork_child();
        if (pid_ == 0) {
            char byte;
            ::close(questions[1]);
            while (::read(questions[0], &byte, 1) == 1)
                if (::write(answers[1], &byte, 1) != 1)
                    break;
            ::_exit(0);
        }
        ::close(questions[0]);
        ::close(answers[1]);
        ask_ = questions[1];
        answer_ = answers[0];
    }
    Answering(const Answering&) = delete;
    Answering& operator=(const Answering&) = delete;
    ~Answering() {
        ::close(ask_);
        ::close(answer_);
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
    }

    pid_t pid() const { return pid_; }
    /// Whether it runs on. A SIGKILL that was sent before the question comes before the answer.
    bool answers() const {
        char byte = 'x';
        return ::write(ask_, &byte, 1) == 1 && ::read(answer_, &byte, 1) == 1;
    }

private:
    pid_t pid_ = 0;
    int ask_ = -1;
    int answer_ = -1;
};

/// Whether a child of this one's child, which attaches to it and dies, is killed by that.
bool dies_with_its_tracer(bool bound, bool ended) {
    const Answering task;
    const pid_t tracer = fork_child();
    if (tracer == 0) {
        std::optional<ExitKill> bind;
        if (bound)
            bind.emplace([](pid_t) {});
        int status = 0;
        if (::ptrace(PTRACE_SEIZE, task.pid(), nullptr, nullptr) != 0 ||
            ::ptrace(PTRACE_INTERRUPT, task.pid(), nullptr, nullptr) != 0 ||
            ::waitpid(task.pid(), &status, __WALL) != task.pid() ||
            ::ptrace(PTRACE_SETOPTIONS, task.pid(), nullptr, PTRACE_O_TRACESYSGOOD) != 0)
            ::_exit(1);
        if (ended)
            bind->end();
        ::raise(SIGKILL);
    }
    // A process lets go of what it traces, or kills it, before its end can be waited for.
    int status = 0;
    CHECK(::waitpid(tracer, &status, 0) == tracer && WIFSIGNALED(status));
    return !task.answers();
}

void criu_does_not_let_go_early() {
    const pid_t task = fork_child();
    if (task == 0)
        for (;;)
            ::pause();
    std::vector<pid_t> told;
    ExitKill bind([&](pid_t tid) {
        told.push_back(tid);
        ::kill(tid, SIGKILL);
    });
    int status = 0;
    CHECK(::ptrace(PTRACE_SEIZE, task, nullptr, nullptr) == 0 &&
          ::ptrace(PTRACE_INTERRUPT, task, nullptr, nullptr) == 0 &&
          ::waitpid(task, &status, __WALL) == task);
    const pid_t child = fork_child();
    if (child == 0) { // detaches from nothing
        ::ptrace(PTRACE_DETACH, task, nullptr, nullptr);
        ::_exit(told.empty() ? 0 : 1);
    }
    CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    CHECK(::ptrace(PTRACE_DETACH, task, nullptr, nullptr) == -1 && errno == ESRCH);
    CHECK(told == std::vector{task});
    CHECK(::waitpid(task, &status, 0) == task && WIFSIGNALED(status));
    bind.end();
    CHECK(::ptrace(PTRACE_DETACH, task, nullptr, nullptr) == -1);
    CHECK(told.size() == 1);
}

} // namespace

int main() {
    ::signal(SIGPIPE, SIG_IGN); // a question to the dead
    CHECK(!dies_with_its_tracer(false, false));
    CHECK(dies_with_its_tracer(true, false));
    CHECK(!dies_with_its_tracer(true, true));
    criu_does_not_let_go_early();
}
