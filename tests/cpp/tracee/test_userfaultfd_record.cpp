// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "other_thread.hpp"
#include "sample.hpp"
#include "userfaultfd_makers.hpp"

#include "tracee/proc.hpp"
#include "tracee/ptrace.hpp"
#include "tracee/task_identity.hpp"
#include "tracee/userfaultfd_record.hpp"

#include <sched.h>
#include <sys/inotify.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <climits>
#include <csignal>
#include <cstddef>
#include <ctime>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

using namespace gpustasis;
using namespace makers;

namespace {

/// Until the clock by which the kernel dates files has gone on.
void wait_for_tick() {
    const auto now = [] {
        timespec time{};
        CHECK(::clock_gettime(CLOCK_REALTIME_COARSE, &time) == 0);
        return std::pair(time.tv_sec, time.tv_nsec);
    };
    const auto before = now();
    CHECK(comes_true([&] { return now() > before; }));
}

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
    const pid_t second = other_thread(target.pid());
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
        wait_for_tick();
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
        UserfaultfdRecord(target.pid(), IfMissing::make, base.path()).begin(); // as a dump
        CHECK(!attach(base.path(), target.pid()));
        CHECK(find_unused_userfaultfds(target.pid()) == both);
        CHECK(is_record(base.path(), target.pid()));
    }
    { // with other flags: nor can that be ours, whenever it was made
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::begun).kill();
        tell(target.pid(), SIGALRM);
        const std::size_t before = descriptors(target.pid());
        CHECK(!attach(base.path(), target.pid()));
        CHECK(descriptors(target.pid()) == before);
    }
    { // and uses it: that cannot be ours
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::made).kill();
        tell(target.pid(), SIGUSR2);
        // Its descriptor is there before it uses it.
        CHECK(comes_true([&] { return find_unused_userfaultfds(target.pid()).size() == 1; }));
        const std::size_t before = descriptors(target.pid());
        CHECK(attach(base.path(), target.pid()).has_value());
        CHECK(descriptors(target.pid()) == before - 1);
    }
}

// It closes descriptors that it does not know, as a daemon does, and opens others: files, or userfaultfds.
void what_has_taken_its_number_is_not_closed() {
    for (const int signal : {SIGHUP, SIGWINCH}) {
        const sample::TempDir base;
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::made).kill();
        UserfaultfdRecord record(target.pid(), IfMissing::nothing, base.path());
        const std::vector<UnusedUserfaultfd> left = record.find_left();
        CHECK(left.size() == 1);
        const std::size_t before = descriptors(target.pid());
        CHECK(::kill(target.pid(), signal) == 0);
        CHECK(comes_true([&] { return descriptors(target.pid()) == before + 2; }));
        const SeizedThread seized(target.pid(), kStop);
        std::atomic<bool> blocked = false;
        std::atomic<std::uint64_t> mask = 0;
        InjectedSyscalls calls({target.pid(), target.pid(), blocked, mask});
        CHECK(!record.close_left(left[0], calls));
        calls.finish();
        CHECK(descriptors(target.pid()) == before + 2);
    }
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

// As where this process has no descriptor left to look with; then a sanitizer could not look either.
void what_cannot_be_looked_for_stays_on_record() {
    constexpr uid_t kNobody = 65534;
    const sample::TempDir base;
    const Child target(prepare);
    Maker(base.path(), target.pid(), At::made).kill();
    {
        UserfaultfdRecord record(target.pid(), IfMissing::make, base.path());
        CHECK(::seteuid(kNobody) == 0);
        CHECK(record.find_left().empty() && record.why_not().has_value());
        CHECK(::seteuid(0) == 0);
        record.begin();
    }
    CHECK(attach(base.path(), target.pid()).has_value());
}

// And of nobody else: what is left in a process that lives is told from its record.
void records_of_the_dead_are_removed() {
    const sample::TempDir base;
    std::string gone;
    {
        const Child target(prepare);
        Maker(base.path(), target.pid(), At::made).kill();
        gone = file_of(base.path(), target.pid());
    }
    const Child other(prepare);
    Maker(base.path(), other.pid(), At::made).kill();
    const Child target(prepare);
    Maker(base.path(), target.pid(), At::made).kill();
    CHECK(!std::filesystem::exists(gone));
    CHECK(is_record(base.path(), other.pid()) && is_record(base.path(), target.pid()));
    CHECK(attach(base.path(), other.pid()).has_value());
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

/// A /run that only this process and its children see, and in it the directory of kUser.
std::string make_run_directory() {
    CHECK(::unshare(CLONE_NEWNS) == 0 &&
          ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    CHECK(::mount("tmpfs", "/run", "tmpfs", 0, "mode=0755") == 0);
    const std::string place = "/run/user/" + std::to_string(kUser);
    CHECK(::mkdir("/run/user", 0755) == 0 && ::mkdir(place.c_str(), 0700) == 0 &&
          ::chown(place.c_str(), kUser, kUser) == 0);
    return place;
}

void root_closes_what_the_owner_has_left() {
    const Child whole([] {
        const std::string place = make_run_directory();
        const auto as_user = [] {
            prepare();
            become(kUser);
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
        // While the owner is at it, what root has left stays: it might be the owner's.
        Maker(std::string(), target.pid(), At::made).kill();
        Maker living(std::string(), target.pid(), At::begun, kUser);
        {
            UserfaultfdRecord record(target.pid(), IfMissing::nothing);
            CHECK(record.find_left().empty());
        }
        living.kill();
        CHECK(attach({}, target.pid()).has_value() && descriptors(target.pid()) == before);
        // A time with which 64 bits of nanoseconds would overflow, to the one that it was.
        Maker(std::string(), target.pid(), At::made, kUser).kill();
        struct stat status {};
        const std::string file = file_of(place, target.pid());
        CHECK(::stat(file.c_str(), &status) == 0);
        timespec times[2]{status.st_mtim, status.st_mtim};
        times[1].tv_sec += std::int64_t{1} << 55;
        CHECK(::utimensat(AT_FDCWD, file.c_str(), times, 0) == 0);
        CHECK(!attach({}, target.pid()));
    });
}

// It could lead to a file system that never answers, while the process stands still.
void no_link_of_a_user_is_followed() {
    const Child whole([] {
        const std::string place = make_run_directory();
        const std::string elsewhere = "/run/elsewhere";
        CHECK(::mkdir(elsewhere.c_str(), 0755) == 0 &&
              ::mkdir((elsewhere + "/userfaultfd").c_str(), 0755) == 0 &&
              ::symlink(elsewhere.c_str(), (place + "/gpustasis").c_str()) == 0);
        const UniqueFd opened(::inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
        CHECK(::inotify_add_watch(opened.get(), elsewhere.c_str(), IN_OPEN) >= 0);
        const Child target([] { become(kUser); });
        CHECK(UserfaultfdRecord(target.pid(), IfMissing::nothing).find_left().empty());
        char event[sizeof(inotify_event) + NAME_MAX + 1];
        CHECK(::read(opened.get(), event, sizeof(event)) < 0 && errno == EAGAIN);
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
    if (::geteuid() != 0)
        return 0;
    what_cannot_be_looked_for_stays_on_record();
    root_closes_what_the_owner_has_left();
    no_link_of_a_user_is_followed();
}
