// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "dirty_tracker/address_space.hpp"
#include "dirty_tracker/dirty_tracker.hpp"
#include "dirty_tracker/userfault.hpp"
#include "tracee/page_scan.hpp"

#include <linux/filter.h>
#include <linux/seccomp.h>
#include <linux/userfaultfd.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstddef>
#include <cstring>
#include <set>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::size_t kPage = 4096;

std::byte* map(std::size_t pages) {
    void* at =
        ::mmap(nullptr, pages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(at != MAP_FAILED);
    ::madvise(at, pages * kPage, MADV_NOHUGEPAGE);
    return static_cast<std::byte*>(at);
}

/// Indices of the pages from `start` on that were written.
std::set<std::size_t> dirty_in(const DirtyPages& pages, const std::byte* start, std::size_t count) {
    std::set<std::size_t> found;
    const auto begin = reinterpret_cast<std::uint64_t>(start);
    for (const PageRange& range : pages.ranges)
        for (std::uint64_t at = range.address; at < range.address + range.length; at += kPage)
            if (at >= begin && at < begin + count * kPage)
                found.insert((at - begin) / kPage);
    return found;
}

void ranges_are_joined_and_nothing_counts_twice() {
    DirtyPages pages;
    pages.add(0x1000, 0x2000);
    pages.add(0x3000, 0x1000);
    pages.add(0x3000, 0x1000);
    pages.add(0x3000, 0x2000);
    pages.add(0x8000, 0x1000);
    CHECK(pages.ranges.size() == 2 && pages.ranges[0].length == 0x4000);
    CHECK(pages.dirty_bytes == 0x5000);
}

void mappings_are_told_apart() {
    const auto use = [](const char* line) { return use_of(parse_maps(line)[0]); };
    CHECK(use("1000-2000 rw-p 0 00:00 0 [heap]") == MappingUse::private_memory);
    CHECK(use("1000-2000 ---p 0 00:00 0") == MappingUse::private_memory);
    CHECK(use("1000-2000 r--p 0 08:01 7 /lib/libc.so.6") == MappingUse::private_memory);
    CHECK(use("1000-2000 r-xp 0 08:01 7 /lib/libc.so.6") == MappingUse::ignored);
    CHECK(use("1000-2000 r-xp 0 00:00 0 [vdso]") == MappingUse::ignored);
    CHECK(use("1000-2000 rw-s 0 00:01 9 /dev/zero (deleted)") == MappingUse::shared_memory);
    CHECK(use("1000-2000 rw-s 0 00:01 9 /memfd:x (deleted)") == MappingUse::shared_memory);
    CHECK(use("1000-2000 rw-s 0 00:05 9 /dev/nvidia0") == MappingUse::ignored);
    CHECK(use("1000-2000 rw-s 0 08:01 9 /data/x") == MappingUse::untracked);
    CHECK(use("1000-2000 r--s 0 08:01 9 /data/x") == MappingUse::ignored);
}

void pages_of_this_process() {
    std::byte* memory = map(16);
    std::memset(memory, 1, 8 * kPage);
    DirtyTracker tracker(::getpid(), DirtyBackend::write_protect);
    CHECK(dirty_in(tracker.scan(false), memory, 16).size() == 8); // before any mark: all
    tracker.mark();
    CHECK(dirty_in(tracker.scan(false), memory, 16).empty());
    memory[3 * kPage] = std::byte{2};
    memory[9 * kPage] = std::byte{2};
    CHECK(*static_cast<volatile std::byte*>(memory + 12 * kPage) == std::byte{0}); // read only
    CHECK((dirty_in(tracker.scan(false), memory, 16) == std::set<std::size_t>{3, 9}));
    CHECK((dirty_in(tracker.scan(true), memory, 16) == std::set<std::size_t>{3, 9}));
    CHECK(dirty_in(tracker.scan(true), memory, 16).empty());
    memory[12 * kPage] = std::byte{2};
    CHECK((dirty_in(tracker.scan(true), memory, 16) == std::set<std::size_t>{12}));
    tracker.close();
    tracker.close();
    CHECK_THROWS(Errc::bad_argument, tracker.mark());
    memory[0] = std::byte{5};
    ::munmap(memory, 16 * kPage);
}

// A mapping that is taken apart while it is scanned must not lose what was protected already.
void what_was_protected_before_an_unregistered_part_is_kept() {
    std::byte* memory = map(8);
    std::memset(memory, 1, 8 * kPage);
    const auto start = reinterpret_cast<std::uint64_t>(memory);
    const AddressSpace self(::getpid());
    Userfault userfault(self);
    PageScanner scanner(self.pagemap());
    CHECK(userfault.add(start, start + 4 * kPage));
    const PageQuery query{.inverted = 0, .all_of = kPageWritten, .any_of = kPagePresent};
    std::vector<PageRange> found;
    CHECK(!scanner.scan(start, start + 8 * kPage, query, ScanMode::protect, true, found));
    CHECK(found.size() == 1 && found[0].address == start && found[0].length == 4 * kPage);
    found.clear();
    CHECK(userfault.add(start, start + 8 * kPage));
    CHECK(scanner.scan(start, start + 8 * kPage, query, ScanMode::protect, true, found));
    CHECK(found.size() == 1 && found[0].address == start + 4 * kPage);
    ::munmap(memory, 8 * kPage);
}

void more_ranges_than_one_call_returns() {
    constexpr std::size_t kPages = 20000;
    std::byte* memory = map(kPages);
    std::memset(memory, 1, kPages * kPage);
    DirtyTracker tracker(::getpid(), DirtyBackend::write_protect);
    tracker.mark();
    for (std::size_t page = 0; page < kPages; page += 2)
        memory[page * kPage] = std::byte{2};
    const auto found = dirty_in(tracker.scan(true), memory, kPages);
    CHECK(found.size() == kPages / 2 && *found.rbegin() == kPages - 2);
    ::munmap(memory, kPages * kPage);
}

void processes_that_cannot_be_tracked() {
    CHECK_THROWS(Errc::bad_argument, DirtyTracker(-1, std::nullopt));
    CHECK_THROWS(Errc::gone, DirtyTracker(0x3ffffe, std::nullopt));
    const pid_t child = fork_child();
    if (child == 0)
        ::pause();
    {
        DirtyTracker tracker(child, std::nullopt);
        tracker.mark();
        ::kill(child, SIGKILL);
        siginfo_t ended{};
        CHECK(::waitid(P_PID, static_cast<id_t>(child), &ended, WEXITED | WNOWAIT) == 0);
        CHECK_THROWS(Errc::gone, tracker.scan(false)); // a zombie
        ::waitpid(child, nullptr, 0);
        CHECK_THROWS(Errc::gone, tracker.scan(true));
    }
}

// It may be a dump that is about to drop memory, and memory has one userfaultfd at most.
void nothing_new_is_taken_of_a_traced_process() {
    auto* shared = static_cast<std::atomic<int>*>(
        ::mmap(nullptr, kPage, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0));
    CHECK(shared != MAP_FAILED);
    constexpr std::size_t kPages = 64;
    std::byte* before = map(kPages);
    std::byte* later = map(kPages);
    ::munmap(later, kPages * kPage);
    const pid_t child = fork_child();
    if (child == 0) {
        while (*shared == 0)
            ::usleep(1000);
        CHECK(::mmap(later, kPages * kPage, PROT_READ | PROT_WRITE,
                     MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0) == later);
        std::memset(later, 1, kPages * kPage);
        std::memset(before, 1, kPage);
        *shared = 2;
        for (;;)
            ::pause();
    }
    {
        DirtyTracker tracker(child, DirtyBackend::write_protect);
        tracker.mark();
        CHECK(::ptrace(PTRACE_SEIZE, child, nullptr, nullptr) == 0);
        *shared = 1;
        CHECK(comes_true([&] { return *shared == 2; }));
        const DirtyPages traced = tracker.scan(true);
        CHECK(dirty_in(traced, later, kPages).empty());
        CHECK(traced.untracked_bytes >= kPages * kPage);
        CHECK(dirty_in(traced, before, kPages) == std::set<std::size_t>{0});
        CHECK(::ptrace(PTRACE_INTERRUPT, child, nullptr, nullptr) == 0);
        CHECK(::waitpid(child, nullptr, __WALL) == child);
        CHECK(::ptrace(PTRACE_DETACH, child, nullptr, nullptr) == 0);
        CHECK(dirty_in(tracker.scan(true), later, kPages).size() == kPages);
    }
    ::kill(child, SIGKILL);
    CHECK(::waitpid(child, nullptr, 0) == child);
    ::munmap(before, kPages * kPage);
    ::munmap(shared, kPage);
}

std::vector<uffdio_range> given_up;

/// In place of UFFDIO_UNREGISTER.
void note_unregister(int, siginfo_t*, void* context) {
    auto& registers = static_cast<ucontext_t*>(context)->uc_mcontext.gregs;
    given_up.push_back(*reinterpret_cast<const uffdio_range*>(registers[REG_RDX]));
    registers[REG_RAX] = 0;
}

/// From now on no UFFDIO_UNREGISTER of this process reaches the kernel: before Linux 6.17 it does what
/// it is told, also to another's memory, and later it does not, so that nothing is to be seen of it.
void catch_unregister() {
    struct sigaction action {};
    action.sa_sigaction = note_unregister;
    action.sa_flags = SA_SIGINFO;
    CHECK(::sigaction(SIGSYS, &action, nullptr) == 0);
    sock_filter code[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_ioctl, 0, 3),
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, args[1])),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, UFFDIO_UNREGISTER, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const sock_fprog filter{sizeof(code) / sizeof(code[0]), code};
    CHECK(::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    CHECK(::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter, 0, 0) == 0);
}

bool was_given_up(const std::byte* page) {
    const auto at = reinterpret_cast<std::uint64_t>(page);
    return std::ranges::any_of(given_up, [at](const uffdio_range& range) {
        return range.start <= at && at < range.start + range.len;
    });
}

// It may stand guard over memory that a dump has taken out of the process.
void memory_of_another_userfaultfd_is_let_alone() {
    const pid_t child = fork_child();
    if (child != 0) {
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && status == 0);
        return;
    }
    std::byte* before = map(3); // between them memory that keeps them apart
    std::byte* ours = before + kPage;
    std::byte* later = before + 2 * kPage;
    CHECK(::mprotect(ours, kPage, PROT_READ) == 0);
    const AddressSpace self(::getpid());
    Userfault another(self);
    const auto give = [&](const std::byte* page) {
        const auto start = reinterpret_cast<std::uint64_t>(page);
        CHECK(another.add(start, start + kPage));
    };
    give(before);
    DirtyTracker tracker(::getpid(), DirtyBackend::write_protect);
    tracker.mark();
    // Ours at first, then a new mapping, and another's.
    CHECK(::mmap(later, kPage, PROT_READ | PROT_WRITE, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1,
                 0) == later);
    give(later);
    given_up.reserve(10'000);
    catch_unregister();
    tracker.close();
    CHECK(was_given_up(ours));
    CHECK(!was_given_up(before) && !was_given_up(later));
    ::_exit(0);
}

} // namespace

int main() {
    ranges_are_joined_and_nothing_counts_twice();
    mappings_are_told_apart();
    processes_that_cannot_be_tracked();
    pages_of_this_process();
    what_was_protected_before_an_unregistered_part_is_kept();
    more_ranges_than_one_call_returns();
    nothing_new_is_taken_of_a_traced_process();
    memory_of_another_userfaultfd_is_let_alone();
}
