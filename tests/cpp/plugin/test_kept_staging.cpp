// SPDX-License-Identifier: Apache-2.0
// Whether staged memory stays in the tasks of a dump. What criu is told of it then: test_hidden_pages.
#include "check.hpp"
#include "child.hpp"
#include "fake_root.hpp"

#include "cuda_plugin/kept_staging.hpp"
#include "tracee/page_scan.hpp"

#include <sys/ioctl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdio>
#include <limits>
#include <optional>
#include <string>
#include <vector>

using namespace gpustasis;
using sample::kMib;
using sample::kPid;
using sample::Root;

namespace {

constexpr pid_t kOther = kPid + 1;
constexpr std::uint64_t kMuch = std::uint64_t{1} << 50;

const std::vector<Region> kPrivate = {
    {0x40000000, 2 * kMib, PROT_READ | PROT_WRITE, RegionKind::private_anonymous}};
const std::vector<Region> kShared = {
    {0x40000000, 2 * kMib, PROT_READ | PROT_WRITE, RegionKind::private_anonymous},
    {0x80000000, 2 * kMib, PROT_READ | PROT_WRITE, RegionKind::shared_anonymous}};

bool has(const std::string& text, const std::string& words) {
    return text.find(words) != std::string::npos;
}

/// Of one dump.
struct Dump {
    explicit Dump(Staging wish) { config.staging = wish; }
    Config config;
    Statistics statistics;
    std::optional<HiddenPages> pages;
    KeptStaging staging{config, statistics, pages};
};

// With 2 % of what they use, and 64 MiB to spare. Dropped, the second one would find the room that the first has given back.
void all_tasks_are_to_fit_at_once() {
    const Root root; // with 1 GiB
    for (const pid_t pid : {kPid, kOther})
        root.cgroups("0::/pod/job\n", pid);
    CHECK(why_not_all_fits({}, root.path()).empty());
    CHECK(why_not_all_fits({{kPid, 470 * kMib}, {kOther, 470 * kMib}}, root.path()).empty());
    const std::string full =
        why_not_all_fits({{kPid, 470 * kMib}, {kOther, 472 * kMib}}, root.path());
    CHECK(has(full, "960 MiB") && has(full, "this host") && has(full, std::to_string(kOther)));
    CHECK(has(why_not_all_fits({{kPid, kMib}, {kOther, std::nullopt}}, root.path()), "not known"));
    root.put("/cg/v2/job/memory.max", std::to_string(200 * kMib));
    root.put("/cg/v2/job/memory.current", "0");
    CHECK(why_not_all_fits({{kPid, 68 * kMib}, {kOther, 65 * kMib}}, root.path()).empty());
    CHECK(has(why_not_all_fits({{kPid, 68 * kMib}, {kOther, 66 * kMib}}, root.path()),
              "cgroup /job/"));
}

void nothing_is_kept_by_default() {
    Dump dump{Config().staging};
    dump.staging.prepare();
    dump.staging.choose({{::getpid(), 1}});
    CHECK(!dump.pages && !dump.staging.keeps(kPrivate));
    dump.staging.finish(true);
}

void what_is_asked_for_by_name_is_done_or_refused() {
    Dump dump(Staging::keep);
    dump.staging.prepare();
    dump.staging.choose({{::getpid(), std::nullopt}});
    CHECK(dump.pages && dump.staging.keeps(kPrivate));
    CHECK_THROWS(Errc::unsupported, dump.staging.keeps(kShared));
}

void auto_keeps_what_fits() {
    const auto keeps = [](std::optional<std::uint64_t> bytes, const std::vector<Region>& regions) {
        Dump dump(Staging::automatic);
        dump.staging.prepare();
        dump.staging.choose({{::getpid(), bytes}});
        return dump.staging.keeps(regions);
    };
    CHECK(keeps(1, kPrivate));
    CHECK(!keeps(1, kShared));
    CHECK(!keeps(kMuch, kPrivate));
    CHECK(!keeps(std::nullopt, kPrivate));
}

void what_stays_with_criu_is_neither() {
    Dump dump(Staging::keep);
    dump.config.externalize = false;
    dump.staging.prepare();
    dump.staging.choose({{::getpid(), 1}});
    CHECK(!dump.pages && !dump.staging.keeps(kPrivate));
}

// The first one's memory is its own risk; those behind it find less room than "drop" would leave them.
void what_is_kept_leaves_less_room_for_the_next() {
    const Child task([] {});
    Dump dump(Staging::keep);
    dump.staging.prepare();
    dump.staging.choose({{task.pid(), kMuch}, {::getpid(), kMuch}});
    CHECK(dump.staging.has_room({task.pid(), kMuch}));
    dump.staging.hide(task.pid(), kPrivate);
    CHECK_THROWS(Errc::unsupported, dump.staging.has_room({::getpid(), kMuch}));
    CHECK(dump.staging.has_room({::getpid(), 1}));
    CHECK(dump.staging.has_room({::getpid(), std::nullopt})); // as ever
}

void auto_drops_where_room_has_become_short() {
    const Child task([] {});
    Dump dump(Staging::automatic);
    dump.staging.prepare();
    dump.staging.choose({{task.pid(), 1}, {::getpid(), 1}});
    dump.staging.hide(task.pid(), kPrivate);
    CHECK(dump.staging.keeps(kPrivate));
    CHECK(!dump.staging.has_room({::getpid(), kMuch}));
    CHECK(!dump.staging.keeps(kPrivate));
    CHECK(dump.staging.has_room({::getpid(), kMuch})); // nothing is kept any more
}

void what_criu_did_not_ask_about_is_counted() {
    const Child task([] {});
    for (const bool succeeded : {false, true}) {
        Dump dump(Staging::keep);
        dump.staging.prepare();
        dump.staging.choose({{task.pid(), kMib}});
        dump.staging.hide(task.pid(), kPrivate);
        for (const char* done : {"kept", "dropped"}) {
            dump.statistics.tasks.emplace_back().pid = task.pid();
            dump.statistics.tasks.back().staging = done;
        }
        dump.staging.finish(succeeded);
        CHECK(dump.statistics.tasks[0].stored_twice == (succeeded ? 2 * kMib : 0));
        CHECK(dump.statistics.tasks[1].stored_twice == 0);
    }
}

} // namespace

int main() {
    // So that this program imports what criu imports.
    ::ioctl(-1, 0);
    if (const std::string why_not = why_no_page_scan(); !why_not.empty()) {
        std::fprintf(stderr, "cannot be run: %s\n", why_not.c_str());
        return 1;
    }
    all_tasks_are_to_fit_at_once();
    nothing_is_kept_by_default();
    what_is_asked_for_by_name_is_done_or_refused();
    auto_keeps_what_fits();
    what_stays_with_criu_is_neither();
    what_is_kept_leaves_less_room_for_the_next();
    auto_drops_where_room_has_become_short();
    what_criu_did_not_ask_about_is_counted();
}
