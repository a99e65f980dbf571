// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "dropped_memory/dump_lock.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <optional>
#include <string>

using namespace gpustasis;

namespace {

const TaskIdentity kTask{.pid_namespace = 7, .inner_pid = 8, .start_time = 9};

std::ptrdiff_t count_files(const sample::TempDir& base) {
    return std::distance(std::filesystem::directory_iterator(base.path("gpustasis/dumping")), {});
}

/// Another process that holds the lock until it is killed.
pid_t start_holder(const sample::TempDir& base) {
    int ready[2];
    CHECK(::pipe2(ready, O_CLOEXEC) == 0);
    const pid_t holder = fork_child();
    if (holder == 0) {
        const DumpLock lock(kTask, "criu 7 dumps it into /its images", base.path());
        CHECK(::write(ready[1], "r", 1) == 1);
        for (;;)
            ::pause();
    }
    char byte = 0;
    CHECK(::read(ready[0], &byte, 1) == 1);
    ::close(ready[0]);
    ::close(ready[1]);
    return holder;
}

void a_second_dump_is_told_of_the_first() {
    const sample::TempDir base;
    const pid_t holder = start_holder(base);
    for (int again = 0; again < 2; ++again) {
        try {
            const DumpLock second(kTask, "/other images", base.path());
            CHECK(false && "nothing was thrown");
        } catch (const Error& e) {
            const std::string text = e.what();
            CHECK(e.code() == Errc::unsupported);
            CHECK(text.find("criu 7 dumps it into /its images; try again") != std::string::npos);
        }
    }
    TaskIdentity other = kTask;
    ++other.start_time;
    { const DumpLock of_another_task(other, "/other images", base.path()); }
    CHECK(count_files(base) == 1); // what is held is not swept away

    CHECK(::kill(holder, SIGKILL) == 0 && ::waitpid(holder, nullptr, 0) == holder);
    const DumpLock after(kTask, "/other images", base.path());
}

void nothing_is_left_behind() {
    const sample::TempDir base;
    { const DumpLock lock(kTask, "/images", base.path()); }
    CHECK(count_files(base) == 0);
    const pid_t holder = start_holder(base);
    CHECK(::kill(holder, SIGKILL) == 0 && ::waitpid(holder, nullptr, 0) == holder);
    CHECK(count_files(base) == 1);
    TaskIdentity other = kTask;
    ++other.inner_pid;
    std::optional<DumpLock> lock(std::in_place, other, "/images", base.path());
    CHECK(count_files(base) == 1);
    DumpLock moved = std::move(*lock);
    lock.reset(); // it is the other object's now
    CHECK_THROWS(Errc::unsupported, DumpLock(other, "/images", base.path()));
}

// criu has children write the images of namespaces, and they end by exit(), which destroys what is static.
void a_child_that_ends_lets_go_of_nothing() {
    const sample::TempDir base;
    std::optional<DumpLock> lock(std::in_place, kTask, "/images", base.path());
    const pid_t child = fork_child();
    if (child == 0) {
        lock.reset();
        ::_exit(0);
    }
    CHECK(::waitpid(child, nullptr, 0) == child);
    CHECK(count_files(base) == 1);
    CHECK_THROWS(Errc::unsupported, DumpLock(kTask, "/images", base.path()));
    lock.reset();
    CHECK(count_files(base) == 0);
}

/// Whether a lock in `base` is not there because of `error`.
bool has_no_place(const std::string& base, int error) {
    const DumpLock lock(kTask, "/images", base);
    return lock.why_not() && lock.why_not()->error_number() == error;
}

void where_no_lock_can_be_is_told() {
    const sample::TempDir base;
    CHECK(!DumpLock(kTask, "/images", base.path()).why_not());
    CHECK(has_no_place(base.path("missing"), ENOENT));
    const std::string closed = base.path("closed");
    CHECK(::mkdir(closed.c_str(), 0555) == 0 && ::chmod(base.path().c_str(), 0755) == 0);
    const pid_t other = fork_child();
    if (other == 0) {
        if (::geteuid() == 0) // whom no mode keeps out
            CHECK(::setresuid(65534, 65534, 65534) == 0);
        CHECK(has_no_place(closed, EACCES));
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(other, &status, 0) == other && WIFEXITED(status) && WEXITSTATUS(status) == 0);
    // What is not to be trusted is no lack of a place.
    CHECK(::chmod(base.path("gpustasis").c_str(), 0777) == 0);
    CHECK_THROWS(Errc::bad_argument, DumpLock(kTask, "/images", base.path()));
}

// A dump that was stopped in the moment for which it holds the directory.
void a_directory_that_stays_locked_is_told() {
    const sample::TempDir base;
    { const DumpLock first(kTask, "/images", base.path()); }
    const UniqueFd held(
        ::open(base.path("gpustasis/dumping").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    CHECK(held && ::flock(held.get(), LOCK_EX) == 0);
    CHECK_THROWS(Errc::unsupported, DumpLock(kTask, "/images", base.path()));
}

// However many begin at once, one of them gets it, and none is turned away by one that looks around.
void one_of_many_gets_it() {
    const sample::TempDir base;
    constexpr int kDumps = 8;
    for (int round = 0; round < 20; ++round) {
        int go[2];
        int got[2];
        CHECK(::pipe2(go, O_CLOEXEC) == 0 && ::pipe2(got, O_CLOEXEC) == 0);
        pid_t dumps[kDumps];
        for (pid_t& dump : dumps) {
            dump = fork_child();
            if (dump != 0)
                continue;
            char byte = 0;
            ::close(go[1]);
            static_cast<void>(::read(go[0], &byte, 1) == 0); // the end of it
            try {
                const DumpLock lock(kTask, "/images", base.path());
                CHECK(::write(got[1], "y", 1) == 1);
                for (;;)
                    ::pause();
            } catch (const Error& e) {
                CHECK(::write(got[1], e.code() == Errc::unsupported ? "n" : "e", 1) == 1);
            }
            ::_exit(0);
        }
        ::close(go[0]);
        ::close(go[1]);
        int winners = 0;
        for (int dump = 0; dump < kDumps; ++dump) {
            char byte = 0;
            CHECK(::read(got[0], &byte, 1) == 1 && byte != 'e');
            winners += byte == 'y' ? 1 : 0;
        }
        CHECK(winners == 1);
        for (const pid_t dump : dumps) {
            ::kill(dump, SIGKILL);
            CHECK(::waitpid(dump, nullptr, 0) == dump);
        }
        ::close(got[0]);
        ::close(got[1]);
    }
}

} // namespace

int main() {
    a_second_dump_is_told_of_the_first();
    nothing_is_left_behind();
    a_child_that_ends_lets_go_of_nothing();
    where_no_lock_can_be_is_told();
    a_directory_that_stays_locked_is_told();
    one_of_many_gets_it();
}
