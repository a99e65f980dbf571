// SPDX-License-Identifier: Apache-2.0
// This program is its own criu: its calls of ioctl are those that the plugin changes.
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "core/unique_fd.hpp"
#include "cuda_plugin/cpu_memory_dump.hpp"
#include "cuda_plugin/hidden_pages.hpp"
#include "cuda_plugin/kept_staging.hpp"

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstddef>
#include <iterator>
#include <optional>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint64_t kPage = 4096;
constexpr std::uint64_t kPages = 64;
// Mapped here and never touched: a child finds it there, and none of its pages.
const std::uint64_t kBase = reinterpret_cast<std::uint64_t>(
    ::mmap(nullptr, kPages* kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));

using Pages = std::vector<std::uint64_t>; ///< numbers, from kBase on

/// A process with kPages pages at kBase, every eighth of them absent.
class Task {
public:
    Task() {
        const std::string path = "/proc/" + std::to_string(child_.pid()) + "/pagemap";
        pagemap_ = UniqueFd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
        CHECK(bool(pagemap_));
    }

    static bool is_there(std::uint64_t page) { return page % 8 != 7; }
    pid_t pid() const { return child_.pid(); }
    int pagemap() const { return pagemap_.get(); }

private:
    static void touch() {
        volatile char* at = reinterpret_cast<char*>(kBase);
        CHECK(::madvise(reinterpret_cast<void*>(kBase), kPages * kPage, MADV_NOHUGEPAGE) == 0);
        for (std::uint64_t page = 0; page < kPages; ++page)
            if (is_there(page))
                at[page * kPage] = 1;
    }

    const Child child_{touch};
    UniqueFd pagemap_;
};

PageScanArguments question(std::uint64_t first, std::uint64_t last,
                           std::vector<ScannedRegion>& answer) {
    PageScanArguments asked;
    asked.start = kBase + first * kPage;
    asked.end = kBase + last * kPage;
    asked.vec = reinterpret_cast<std::uint64_t>(answer.data());
    asked.vec_len = answer.size();
    asked.category_inverted = asked.category_mask = kPageZero | kPageFile; // as CRIU asks
    asked.category_anyof_mask = kPagePresent | kPageSwapped;
    asked.return_mask = kPagePresent | kPageSwapped;
    return asked;
}

/// What a caller finds that goes on where an answer ends.
Pages scan(int pagemap, std::uint64_t first, std::uint64_t last, std::size_t room,
           std::uint64_t max_pages = 0) {
    Pages found;
    std::vector<ScannedRegion> answer(room);
    PageScanArguments asked = question(first, last, answer);
    asked.max_pages = max_pages;
    while (asked.start < asked.end) {
        const int count = ::ioctl(pagemap, kPagemapScan, &asked);
        CHECK(count >= 0 && static_cast<std::size_t>(count) <= room);
        CHECK(asked.walk_end > asked.start && asked.walk_end <= asked.end);
        std::uint64_t pages = 0;
        for (int i = 0; i < count; ++i) {
            const ScannedRegion& region = answer[static_cast<std::size_t>(i)];
            CHECK(region.start >= asked.start && region.end <= asked.walk_end);
            for (std::uint64_t at = region.start; at < region.end; at += kPage, ++pages)
                found.push_back((at - kBase) / kPage);
        }
        CHECK(max_pages == 0 || pages <= max_pages);
        asked.start = asked.walk_end;
    }
    CHECK(asked.walk_end == asked.end);
    return found;
}

Region pages(std::uint64_t first, std::uint64_t count) {
    return {kBase + first * kPage, count * kPage, PROT_READ | PROT_WRITE,
            RegionKind::private_anonymous};
}

Pages expected(std::uint64_t first, std::uint64_t last, const std::vector<Region>& hidden) {
    Pages found;
    for (std::uint64_t page = first; page < last; ++page) {
        const std::uint64_t at = kBase + page * kPage;
        bool is_hidden = false;
        for (const Region& region : hidden)
            is_hidden = is_hidden || (region.address <= at && at < region.address + region.length);
        if (Task::is_there(page) && !is_hidden)
            found.push_back(page);
    }
    return found;
}

void hidden_pages_are_not_found(const Task& task) {
    const std::vector<std::vector<Region>> choices = {
        {pages(0, 5)},      {pages(59, 5)},
        {pages(0, kPages)}, {pages(5, 1), pages(6, 10), pages(20, 4), pages(33, 30)},
        {pages(7, 1)}, // nothing is there
    };
    for (const std::vector<Region>& hidden : choices) {
        HiddenPages hiding;
        hiding.hide(task.pid(), MemoryKind::cpu, hidden);
        for (const std::size_t room : {std::size_t{1}, std::size_t{2}, std::size_t{100}})
            for (const std::uint64_t most : {0U, 1U, 3U, 1000U})
                for (const auto& [first, last] :
                     {std::pair<std::uint64_t, std::uint64_t>{0, kPages},
                      {3, 9},
                      {6, 7},
                      {15, 34},
                      {63, 64}})
                    CHECK(scan(task.pagemap(), first, last, room, most) ==
                          expected(first, last, hidden));
        CHECK(hiding.answered(task.pid(), MemoryKind::cpu).scans > 0);
    }
    CHECK(scan(task.pagemap(), 0, kPages, 1) == expected(0, kPages, {})); // and now they are
}

void an_answer_counts_what_it_lacks(const Task& task) {
    HiddenPages hiding;
    hiding.hide(task.pid(), MemoryKind::cpu, {pages(8, 4), pages(16, 4)});
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).wanted == 8 * kPage);
    scan(task.pagemap(), 0, 10, 100);
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).hidden == 2 * kPage);
    scan(task.pagemap(), 10, 64, 100);
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).hidden == 8 * kPage);
    scan(task.pagemap(), 30, 64, 100); // nothing of it is hidden
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).scans == 2);
    scan(task.pagemap(), 0, 64, 100); // again
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).hidden == 8 * kPage);
}

void what_is_asked_twice_counts_once(const Task& task) {
    HiddenPages hiding;
    hiding.hide(task.pid(), MemoryKind::cpu, {pages(8, 4), pages(16, 4)});
    for (int i = 0; i < 2; ++i)
        scan(task.pagemap(), 0, 10, 100);
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).hidden == 2 * kPage);
    scan(task.pagemap(), 9, 12, 100);
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).hidden == 4 * kPage);
}

void what_is_hidden_in_two_steps_is_counted_apart(const Task& task) {
    HiddenPages hiding;
    hiding.hide(task.pid(), MemoryKind::gpu, {pages(16, 4), pages(40, 2)});
    hiding.hide(task.pid(), MemoryKind::cpu,
                {pages(0, 2), pages(20, 4), pages(60, 4)}); // one touches
    const std::vector<Region> all = {pages(0, 2), pages(16, 8), pages(40, 2), pages(60, 4)};
    for (const std::size_t room : {std::size_t{1}, std::size_t{100}})
        CHECK(scan(task.pagemap(), 10, kPages, room) == expected(10, kPages, all));
    const auto gpu = hiding.answered(task.pid(), MemoryKind::gpu);
    const auto cpu = hiding.answered(task.pid(), MemoryKind::cpu);
    CHECK(gpu.wanted == 6 * kPage && gpu.hidden == 6 * kPage && gpu.scans > 0);
    CHECK(cpu.wanted == 10 * kPage && cpu.hidden == 8 * kPage && cpu.scans > 0);
    CHECK(scan(task.pagemap(), 0, kPages, 7) == expected(0, kPages, all));
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).hidden == 10 * kPage);
}

void a_process_that_is_gone_keeps_what_was_hidden(const Task& task) {
    HiddenPages hiding;
    hiding.hide(task.pid(), MemoryKind::gpu, {pages(0, 4)});
    CHECK_THROWS(Errc::io, hiding.hide(0, MemoryKind::gpu, {pages(0, 4)}));
    CHECK(scan(task.pagemap(), 0, kPages, 100) == expected(0, kPages, {pages(0, 4)}));
}

void other_tasks_and_other_questions_are_answered_by_the_kernel(const Task& task) {
    const Task other;
    HiddenPages hiding;
    hiding.hide(task.pid(), MemoryKind::cpu, {pages(0, kPages)});
    CHECK(scan(other.pagemap(), 0, kPages, 1) == expected(0, kPages, {}));
    std::vector<ScannedRegion> answer(4);
    PageScanArguments asked = question(0, kPages, answer);
    asked.start += 1; // not at a page
    errno = 0;
    CHECK(::ioctl(task.pagemap(), kPagemapScan, &asked) == -1 && errno == EINVAL);
    asked = question(0, kPages, answer);
    asked.category_inverted = asked.category_mask = asked.category_anyof_mask = 0; // every page
    CHECK(::ioctl(task.pagemap(), kPagemapScan, &asked) > 0);
    CHECK(hiding.answered(task.pid(), MemoryKind::cpu).scans == 0);
    asked = question(0, kPages, answer);
    asked.size = 8;
    CHECK(::ioctl(task.pagemap(), kPagemapScan, &asked) == -1 && errno == EINVAL);
    CHECK(::ioctl(-1, kPagemapScan, &asked) == -1 && errno == EBADF);
    int ends[2];
    CHECK(::pipe(ends) == 0 && ::write(ends[1], "four", 4) == 4);
    int bytes = 0;
    CHECK(::ioctl(ends[0], FIONREAD, &bytes) == 0 && bytes == 4);
    ::close(ends[0]);
    ::close(ends[1]);
}

void an_error_of_the_kernel_is_the_answer(const Task& task) {
    HiddenPages hiding;
    hiding.hide(task.pid(), MemoryKind::cpu, {pages(0, 8)});
    std::vector<ScannedRegion> answer(4);
    PageScanArguments asked = question(0, kPages, answer);
    asked.vec = 8; // no memory of ours
    errno = 0;
    CHECK(::ioctl(task.pagemap(), kPagemapScan, &asked) == -1 && errno == EFAULT);
}

/// In a child whose kernel, as far as it can see, is older than Linux 6.7.
template <class Body>
void without_page_scan(const Body& body) {
    const pid_t child = fork_child();
    if (child == 0) {
        sock_filter program[] = {
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
            BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
            BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, static_cast<std::uint32_t>(kPagemapScan), 0, 1),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOTTY),
            BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
        };
        sock_fprog filter{std::size(program), program};
        CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
        CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0);
        body();
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

void what_cannot_be_done_is_refused_if_asked_for_by_name() {
    without_page_scan([] {
        CHECK_THROWS(Errc::unsupported, HiddenPages());
        const sample::TempDir dir;
        Lineage lineage(dir.fd());
        Statistics statistics;
        Config config;
        DumpImages images(config, dir.fd(), lineage, statistics);
        std::optional<HiddenPages> pages;
        CpuMemoryDump dump(config, images, statistics, pages);
        const auto is_on = [&](CpuMemory wish) {
            config.cpu_memory = wish;
            dump.prepare();
            return dump.is_on();
        };
        CHECK(!is_on(CpuMemory::criu));
        CHECK(!is_on(CpuMemory::automatic));
        CHECK_THROWS(Errc::unsupported, is_on(CpuMemory::ours));
        const auto prepare = [&](Staging wish) {
            config.staging = wish;
            KeptStaging(config, statistics, pages).prepare();
        };
        prepare(Staging::drop);
        prepare(Staging::automatic);
        CHECK_THROWS(Errc::unsupported, prepare(Staging::keep));
        config.externalize = false; // it stays in criu's images
        prepare(Staging::keep);
        CHECK(!pages);
    });
}

} // namespace

int main() {
    if (const std::string why_not = why_no_page_scan(); !why_not.empty()) {
        std::fprintf(stderr, "cannot be run: %s\n", why_not.c_str());
        return 1;
    }
    const Task task;
    hidden_pages_are_not_found(task);
    an_answer_counts_what_it_lacks(task);
    what_is_asked_twice_counts_once(task);
    what_is_hidden_in_two_steps_is_counted_apart(task);
    a_process_that_is_gone_keeps_what_was_hidden(task);
    other_tasks_and_other_questions_are_answered_by_the_kernel(task);
    an_error_of_the_kernel_is_the_answer(task);
    what_cannot_be_done_is_refused_if_asked_for_by_name();
}
