// SPDX-License-Identifier: Apache-2.0
/// A process for a test to look at.
#pragma once

#include "check.hpp"

#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>

/// Be another user from now on, whose other processes may trace this one, and die with the test all the same.
inline void become(uid_t user) {
    CHECK(::setresuid(user, user, user) == 0 && ::prctl(PR_SET_DUMPABLE, 1) == 0 &&
          ::prctl(PR_SET_PDEATHSIG, SIGKILL) == 0);
}

/// A child that has done `prepare` and then stands still, until end() or the end of the test's block.
class Child {
public:
    Child() : Child([] {}) {}
    template <class Prepare>
    explicit Child(const Prepare& prepare) {
        int ready[2];
        CHECK(::pipe(ready) == 0);
        pid_ = fork_child();
        CHECK(pid_ >= 0);
        if (pid_ == 0) {
            prepare();
            CHECK(::write(ready[1], "r", 1) == 1);
            for (;;)
                ::pause();
        }
        ::close(ready[1]); // so that a child which has failed is not waited for
        char byte = 0;
        CHECK(::read(ready[0], &byte, 1) == 1);
        ::close(ready[0]);
    }
    Child(const Child&) = delete;
    Child& operator=(const Child&) = delete;
    ~Child() { end(); }
    void end() {
        if (pid_ == 0)
            return;
        ::kill(pid_, SIGKILL);
        ::waitpid(pid_, nullptr, 0);
        pid_ = 0;
    }
    pid_t pid() const { return pid_; }

private:
    pid_t pid_ = 0;
};
