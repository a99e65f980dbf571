// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"

#include "dropped_memory/missing_pages.hpp"
#include "dropped_memory/userfaultfd_setting.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/task_identity.hpp"
#include "tracee/userfaultfd_record.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdlib>
#include <optional>
#include <string>
#include <thread>

using namespace gpustasis;

namespace {

constexpr const char* kSetting = "/proc/sys/vm/unprivileged_userfaultfd";
constexpr uid_t kUser = 65534;

void write_file(const char* path, const std::string& text) {
    const UniqueFd file(::open(path, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600));
    CHECK(file &&
          ::write(file.get(), text.data(), text.size()) == static_cast<ssize_t>(text.size()));
}

char setting() {
    const UniqueFd file(::open(kSetting, O_RDONLY | O_CLOEXEC));
    char value = 0;
    CHECK(file && ::read(file.get(), &value, 1) == 1);
    return value;
}

void set(char value) {
    write_file(kSetting, {value, '\n'});
}

/// A /run and a file in place of the setting that only this process and its children see: the machine's
/// own stay as they are.
void leave_the_machine_alone() {
    const uid_t user = ::geteuid();
    if (::unshare(CLONE_NEWNS) != 0) {
        CHECK(::unshare(CLONE_NEWUSER | CLONE_NEWNS) == 0);
        write_file("/proc/self/setgroups", "deny");
        write_file("/proc/self/uid_map", "0 " + std::to_string(user) + " 1");
    }
    CHECK(::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    CHECK(::mount("tmpfs", "/run", "tmpfs", 0, "mode=0755") == 0);
    write_file("/run/setting", "0\n");
    CHECK(::mount("/run/setting", kSetting, nullptr, MS_BIND, nullptr) == 0);
}

/// A process that raises the setting, says so, and holds it until it is let go or killed.
class Raising {
public:
    Raising() {
        CHECK(::pipe2(raised_, O_CLOEXEC) == 0 && ::pipe2(let_go_, O_CLOEXEC) == 0);
        pid_ = fork_child();
        if (pid_ == 0) {
            {
                const UserfaultfdAllowed allowed;
                CHECK(::write(raised_[1], "r", 1) == 1);
                char byte = 0;
                CHECK(::read(let_go_[0], &byte, 1) == 1);
            }
            ::_exit(0);
        }
        CHECK(::fcntl(raised_[0], F_SETFL, O_NONBLOCK) == 0);
    }
    Raising(const Raising&) = delete;
    Raising& operator=(const Raising&) = delete;
    ~Raising() {
        for (const int fd : {raised_[0], raised_[1], let_go_[0], let_go_[1]})
            ::close(fd);
    }
    bool has_raised() {
        char byte = 0;
        said_ = said_ || ::read(raised_[0], &byte, 1) == 1;
        return said_;
    }
    bool waits_for_a_lock() const {
        char text[64]{};
        const UniqueFd file(
            ::open(("/proc/" + std::to_string(pid_) + "/syscall").c_str(), O_RDONLY | O_CLOEXEC));
        return file && ::read(file.get(), text, sizeof(text) - 1) > 0 && std::atoi(text) == kPoll;
    }
    void let_go() {
        int status = 0;
        CHECK(::write(let_go_[1], "g", 1) == 1);
        CHECK(::waitpid(pid_, &status, 0) == pid_ && status == 0);
    }
    void kill() { CHECK(::kill(pid_, SIGKILL) == 0 && ::waitpid(pid_, nullptr, 0) == pid_); }

private:
    static constexpr int kPoll = 7; // x86-64
    int raised_[2];
    int let_go_[2];
    pid_t pid_ = 0;
    bool said_ = false;
};

void it_is_raised_for_the_moment() {
    {
        const UserfaultfdAllowed allowed;
        CHECK(setting() == '1');
    }
    CHECK(setting() == '0' && !is_userfaultfd_setting_left());
}

void what_the_administrator_has_set_stays() {
    set('1');
    {
        const UserfaultfdAllowed allowed;
        CHECK(setting() == '1' && !is_userfaultfd_setting_left());
    }
    CHECK(setting() == '1' && !lower_userfaultfd_setting() && setting() == '1');
    set('0');
}

// The second must not take what the first has raised for the administrator's will.
void one_after_the_other() {
    Raising first;
    CHECK(comes_true([&] { return first.has_raised(); }));
    Raising second;
    CHECK(comes_true([&] { return second.waits_for_a_lock(); }));
    CHECK(!second.has_raised());
    // As a worker does whose criu is about to die: it waits for nobody, and takes it from nobody.
    CHECK(!lower_userfaultfd_setting() && !is_userfaultfd_setting_left() && setting() == '1');
    first.let_go();
    CHECK(comes_true([&] { return second.has_raised(); }));
    CHECK(setting() == '1');
    second.let_go();
    CHECK(setting() == '0' && !is_userfaultfd_setting_left());
}

// A dump that was stopped in that moment must not hang the next, whose tasks are frozen.
void who_holds_it_for_long_is_told() {
    Raising first;
    CHECK(comes_true([&] { return first.has_raised(); }));
    CHECK_THROWS(Errc::unsupported, UserfaultfdAllowed(50));
    CHECK(setting() == '1');
    first.let_go();
    CHECK(setting() == '0');
}

void what_a_killed_process_has_left_is_set_back() {
    Raising killed;
    CHECK(comes_true([&] { return killed.has_raised(); }));
    killed.kill();
    CHECK(setting() == '1' && is_userfaultfd_setting_left());
    {
        const UserfaultfdAllowed next; // by the next that needs it
        CHECK(setting() == '1');
    }
    CHECK(setting() == '0');

    Raising again;
    CHECK(comes_true([&] { return again.has_raised(); }));
    again.kill();
    CHECK(lower_userfaultfd_setting() && setting() == '0' && !is_userfaultfd_setting_left());
}

timespec written(const std::string& path) {
    struct stat status {};
    CHECK(::stat(path.c_str(), &status) == 0);
    return status.st_mtim;
}

// What is made is looked for in the seconds after its record: the wait for the setting is none of them.
void a_record_begins_behind_the_wait() {
    const Child target([] { become(kUser); });
    UserfaultfdRecord record(target.pid(), IfMissing::make, "/run");
    const std::string file = "/run/gpustasis/userfaultfd/" + file_name(identify_task(target.pid()));
    Raising first;
    CHECK(comes_true([&] { return first.has_raised(); }));
    std::thread holder([&] {
        CHECK(comes_true([&] {
            struct stat status {};
            return ::stat(file.c_str(), &status) == 0 && status.st_size != 0;
        }));
        ::usleep(20'000); // more than a tick of the kernel's clock
        write_file("/run/let-go", "");
        first.let_go();
    });
    const SeizedThread seized(target.pid(), std::chrono::seconds(10));
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    InjectedSyscalls calls({target.pid(), target.pid(), blocked, mask});
    // The kernel's own setting is not the one that is raised here.
    CHECK_THROWS(Errc::unsupported, make_userfaultfd(calls, target.pid(), record));
    holder.join();
    const timespec begun = written(file);
    const timespec let_go = written("/run/let-go");
    CHECK(begun.tv_sec > let_go.tv_sec ||
          (begun.tv_sec == let_go.tv_sec && begun.tv_nsec >= let_go.tv_nsec));
}

} // namespace

int main() {
    const bool may_be_refused = ::geteuid() == 0 && setting() == '0';
    leave_the_machine_alone();
    it_is_raised_for_the_moment();
    what_the_administrator_has_set_stays();
    one_after_the_other();
    who_holds_it_for_long_is_told();
    what_a_killed_process_has_left_is_set_back();
    if (may_be_refused)
        a_record_begins_behind_the_wait();
}
