// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/task_identity.hpp"
#include "tracee/userfaultfd_record.hpp"

#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstddef>
#include <filesystem>
#include <optional>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::chrono::seconds kStop{10};
constexpr std::uint64_t kFlags = O_CLOEXEC | O_NONBLOCK | 1; // UFFD_USER_MODE_ONLY
constexpr uid_t kUser = 65534;

void make_own(int signal) {
    const long made = ::syscall(SYS_userfaultfd, kFlags);
    uffdio_api api{};
    api.api = UFFD_API;
    if (signal == SIGUSR2)
        static_cast<void>(::ioctl(static_cast<int>(made), UFFDIO_API, &api));
}

void replace_all(int /*signal*/) {
    const int highest = ::open("/dev/null", O_RDONLY);
    for (int fd = 3; fd < highest; ++fd)
        ::dup2(highest, fd);
    ::dup(highest);
}

/// Makes a userfaultfd of its own at SIGUSR1, and one that it uses at SIGUSR2. At SIGHUP it has other
/// files under the numbers of all its descriptors.
void prepare() {
    ::signal(SIGUSR1, make_own);
    ::signal(SIGUSR2, make_own);
    ::signal(SIGHUP, replace_all);
}

void prepare_two_threads() {
    prepare();
    std::thread([] {
        for (;;)
            ::pause();
    }).detach();
}

std::size_t descriptors(pid_t pid) {
    const std::filesystem::directory_iterator all("/proc/" + std::to_string(pid) + "/fd");
    return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

void tell(pid_t pid, int signal) {
    const std::size_t before = descriptors(pid);
    CHECK(::kill(pid, signal) == 0);
    CHECK(comes_true([=] { return descriptors(pid) == before + 1; }));
}

std::string file_of(const std::string& base, pid_t pid) {
    return base + "/gpustasis/userfaultfd/" + file_name(identify_task(pid));
}

bool is_record(const std::string& base, pid_t pid) {
    struct stat status {};
    return ::stat(file_of(base, pid).c_str(), &status) == 0 && status.st_size != 0;
}

void make_older(const std::string& base, pid_t pid) {
    timespec times[2]{};
    ::clock_gettime(CLOCK_REALTIME, &times[1]);
    times[1].tv_sec -= 10;
    times[0] = times[1];
    CHECK(::utimensat(AT_FDCWD, file_of(base, pid).c_str(), times, 0) == 0);
}

/// The number that it has closed.
std::optional<int> close_what_is_left(UserfaultfdRecord& record, InjectedSyscalls& calls, pid_t pid,
                                      pid_t tid) {
    const std::vector<UnusedUserfaultfd> left = record.find_left();
    CHECK(left.size() <= 1);
    if (left.empty() || others_are_traced(pid, tid) || !record.close_left(left[0], calls))
        return std::nullopt;
    return left[0].fd;
}

/// What a tracker does: a descriptor is made, taken and closed. The number of what was left, and
/// is closed before.
std::optional<int> attach(const std::string& base, pid_t pid) {
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
    UserfaultfdRecord record(pid, IfMissing::make, base);
    const SeizedThread seized(pid, kStop);
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    InjectedSyscalls calls({pid, pid, blocked, mask});
    const auto closed = close_what_is_left(record, calls, pid, pid);
    record.begin();
    const UniqueFd made = take_descriptor(calls, pidfd.get(), SYS_userfaultfd, kFlags);
    CHECK(static_cast<bool>(made));
    record.end();
    calls.finish();
    return closed;
}

enum class At {
    begun, ///< the record is written, nothing is made yet
    made,  ///< the descriptor is there, and not closed
};

/// Another process that borrows thread `tid` and comes so far, until it is killed.
class Maker {
public:
    Maker(const std::string& base, pid_t pid, At at, uid_t user = ::geteuid())
        : Maker(base, pid, at, pid, user) {}
    Maker(const std::string& base, pid_t pid, At at, pid_t tid, uid_t user)
        : child_([&, pid, tid, at, user] {
              CHECK(user == ::geteuid() || ::setresuid(user, user, user) == 0);
              record.emplace(pid, IfMissing::make, base);
              thread.emplace(tid, kStop);
              calls.emplace(BorrowedThread{pid, tid, blocked, mask});
              CHECK(calls->has_way_back());
              close_what_is_left(*record, *calls, pid, tid);
              record->begin();
              if (at == At::made)
                  CHECK(calls->call_if_alive(SYS_userfaultfd, kFlags) >= 0);
          }) {}
    void kill() { child_.end(); }

private:
    // The child's own, which it never destroys.
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    std::optional<UserfaultfdRecord> record;
    std::optional<SeizedThread> thread;
    std::optional<InjectedSyscalls> calls;
    Child child_;
};

void what_a_dead_maker_has_left_is_closed() {
    const sample::TempDir base;
    const Child target(prepare);
    const std::size_t before = descriptors(target.pid());
    for (int round = 0; round < 3; ++round) {
        Maker(base.path(), target.pid(), At::made).kill();
        CHECK(descriptors(target.pid()) == before + 1);
        CHECK(is_record(base.path(), target.pid()));
        CHECK(attach(base.path(), target.pid()).has_value());
        CHECK(descriptors(target.pid()) == before);
        CHECK(!base.has("gpustasis/userfaultfd/" + file_name(identify_task(target.pid()))));
        CHECK(!attach(base.path(), target.pid()));
        CHECK(descriptors(target.pid()) == before);
    }
}

// Each closes that of the one before it.
void a_chain_of_dead_makers_leaves_one() {
    const sample::TempDir base;
    const Child target(prepare);
    const std::size_t before = descriptors(target.pid());
    for (const At at : {At::made, At::made, At::begun, At::made, At::made}) {
        Maker(base.path(), target.pid(), at).kill();
        CHECK(is_record(base.path(), target.pid()));
        CHECK(descriptors(target.pid()) == before + (at == At::made ? 1 : 0));
    }
    CHECK(attach(base.path(), target.pid()).has_value());
    CHECK(descriptors(target.pid()) == before);
}

void nothing_is_closed_while_its_maker_lives() {
    const sample::TempDir base;
    const Child target(prepare_two_threads);
    const std::size_t before = descriptors(target.pid());
    Maker maker(base.path(), target.pid(), At::made);
    {
        UserfaultfdRecord record(target.pid(), IfMissing::nothing, base.path());
        CHECK(record.find_left().empty());
        CHECK(record.why_not().has_value());
    }
    {
        UserfaultfdRecord record(target.pid(), IfMissing::make, base.path());
        CHECK(record.find_left().empty());
        CHECK(record.why_not().has_value());
        record.begin(); // not over that one's
        record.end();
    }
    CHECK(is_record(base.path(), target.pid()));
    CHECK(descriptors(target.pid()) == before + 1);
    maker.kill();
    CHECK(attach(base.path(), target.pid()).has_value());
    CHECK(descriptors(target.pid()) == before);
}

// One whose records are elsewhere: another user's, or those of another mount namespace.
void nothing_is_closed_while_a_thread_is_traced() {
    const sample::TempDir base;
    const sample::TempDir elsewhere;
    const Child target(prepare_two_threads);
    const std::size_t before = descriptors(target.pid());
    const pid_t second = proc::threads(target.pid()).back();
    CHECK(second != target.pid());
    CHECK(!others_are_traced(target.pid(), target.pid()));
    Maker(base.path(), target.pid(), At::begun).kill();
    Maker living(elsewhere.path(), target.pid(), At::made, second, ::geteuid());
    CHECK(comes_true([&] { return others_are_traced(target.pid(), target.pid()); }));
    CHECK(!others_are_traced(target.pid(), second));
    CHECK(!attach(base.path(), target.pid()));
    CHECK(descriptors(target.pid()) == before + 1);
    living.kill();
    CHECK(comes_true([&] { return !others_are_traced(target.pid(), target.pid()); }));
    CHECK(attach(elsewhere.path(), target.pid()).has_value());
    CHECK(descriptors(target.pid()) == before);
}

void what_the_process_has_made_itself_is_never_closed() {
    const sample::TempDir base;
    { // before: what was left is told from it
        const Child target(prepare);
        tell(target.pid(), SIGUSR1);
        ::usleep(20'000); // more than a tick of the kernel's clock
        const std::vector<UnusedUserfaultfd> own = find_unused_userfaultfds(target.pid());
        CHECK(own.size() == 1);
        CHECK(!attach(base.path(), target.pid()));
        Maker(base.path(), target.pid(), At::made).kill();
        CHECK(find_unused_userfaultfds(target.pid()).size() == 2);
        CHECK(attach(base.path(), target.pid()).has_value());
        CHECK(find_unused_userfaultfds(target.pid()) == own);
    }
    { // after, and nothing was left
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::begun).kill();
        make_older(base.path(), target.pid());
        tell(target.pid(), SIGUSR1);
        const std::vector<UnusedUserfaultfd> own = find_unused_userfaultfds(target.pid());
        CHECK(!attach(base.path(), target.pid()));
        CHECK(own.size() == 1 && find_unused_userfaultfds(target.pid()) == own);
        CHECK(!is_record(base.path(), target.pid()));
    }
    { // right after what was left: nobody can tell
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::made).kill();
        tell(target.pid(), SIGUSR1);
        const std::vector<UnusedUserfaultfd> both = find_unused_userfaultfds(target.pid());
        CHECK(both.size() == 2);
        {
            UserfaultfdRecord record(target.pid(), IfMissing::nothing, base.path());
            CHECK(record.find_left().empty() && record.why_not().has_value());
        }
        CHECK(!attach(base.path(), target.pid()));
        CHECK(find_unused_userfaultfds(target.pid()) == both);
        CHECK(is_record(base.path(), target.pid()));
    }
    { // and uses it: that cannot be ours
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::made).kill();
        tell(target.pid(), SIGUSR2);
        const std::size_t before = descriptors(target.pid());
        CHECK(attach(base.path(), target.pid()).has_value());
        CHECK(descriptors(target.pid()) == before - 1);
    }
}

// It closes descriptors that it does not know, as a daemon does, and opens others.
void what_has_taken_its_number_is_not_closed() {
    const sample::TempDir base;
    const Child target(prepare);
    Maker(base.path(), target.pid(), At::made).kill();
    UserfaultfdRecord record(target.pid(), IfMissing::nothing, base.path());
    const std::vector<UnusedUserfaultfd> left = record.find_left();
    CHECK(left.size() == 1);
    const std::size_t before = descriptors(target.pid());
    CHECK(::kill(target.pid(), SIGHUP) == 0);
    CHECK(comes_true([&] { return descriptors(target.pid()) == before + 2; }));
    const SeizedThread seized(target.pid(), kStop);
    std::atomic<bool> blocked = false;
    std::atomic<std::uint64_t> mask = 0;
    InjectedSyscalls calls({target.pid(), target.pid(), blocked, mask});
    CHECK(!record.close_left(left[0], calls));
    calls.finish();
    CHECK(descriptors(target.pid()) == before + 2);
}

// The thread of a maker that has just died may not have come to its call yet.
void a_record_stays_while_a_thread_may_be_on_its_way() {
    const sample::TempDir base;
    const Child target(prepare);
    Maker(base.path(), target.pid(), At::begun).kill();
    CHECK(!attach(base.path(), target.pid()) && is_record(base.path(), target.pid()));
    make_older(base.path(), target.pid());
    CHECK(!attach(base.path(), target.pid()) && !is_record(base.path(), target.pid()));
}

void records_of_the_dead_are_removed() {
    const sample::TempDir base;
    std::string gone;
    {
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::made).kill();
        gone = file_of(base.path(), target.pid());
    }
    const Child target(prepare);
    Maker(base.path(), target.pid(), At::made).kill();
    CHECK(!std::filesystem::exists(gone) && is_record(base.path(), target.pid()));
}

// No record can be written: that is no failure.
void without_a_place_all_else_goes_on() {
    const sample::TempDir base;
    const Child target(prepare);
    const std::size_t before = descriptors(target.pid());
    CHECK(!attach(base.path("missing"), target.pid()));
    CHECK(::chmod(base.path().c_str(), 0700) == 0);
    CHECK(::mkdir(base.path("gpustasis").c_str(), 0700) == 0);
    CHECK(::chmod(base.path("gpustasis").c_str(), 0777) == 0); // others could write there
    CHECK(!attach(base.path(), target.pid()));
    CHECK(descriptors(target.pid()) == before);
}

void root_closes_what_the_owner_has_left() {
    const Child whole([] {
        CHECK(::unshare(CLONE_NEWNS) == 0 &&
              ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
        CHECK(::mount("tmpfs", "/run", "tmpfs", 0, "mode=0755") == 0);
        const std::string place = "/run/user/" + std::to_string(kUser);
        CHECK(::mkdir("/run/user", 0755) == 0 && ::mkdir(place.c_str(), 0700) == 0 &&
              ::chown(place.c_str(), kUser, kUser) == 0);
        const auto as_user = [] {
            prepare();
            CHECK(::setresuid(kUser, kUser, kUser) == 0 && ::prctl(PR_SET_DUMPABLE, 1) == 0);
        };
        const Child target(as_user);
        const Child of_root(prepare);
        const std::size_t before = descriptors(target.pid());
        Maker(std::string(), target.pid(), At::made, kUser).kill();
        CHECK(descriptors(target.pid()) == before + 1 && is_record(place, target.pid()));
        // A user's word about a process of another's is not taken.
        tell(of_root.pid(), SIGUSR1);
        std::filesystem::copy_file(file_of(place, target.pid()), file_of(place, of_root.pid()));
        CHECK(!attach({}, of_root.pid()));
        CHECK(attach({}, target.pid()).has_value());
        CHECK(descriptors(target.pid()) == before && !is_record(place, target.pid()));
    });
}

} // namespace

int main() {
    what_a_dead_maker_has_left_is_closed();
    a_chain_of_dead_makers_leaves_one();
    nothing_is_closed_while_its_maker_lives();
    nothing_is_closed_while_a_thread_is_traced();
    what_the_process_has_made_itself_is_never_closed();
    what_has_taken_its_number_is_not_closed();
    a_record_stays_while_a_thread_may_be_on_its_way();
    records_of_the_dead_are_removed();
    without_a_place_all_else_goes_on();
    if (::geteuid() == 0)
        root_closes_what_the_owner_has_left();
}
