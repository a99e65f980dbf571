// SPDX-License-Identifier: Apache-2.0
// Another process's soft-dirty bits, where the kernel has them. Elsewhere there is one thing to
// see: that the backend is refused. tests/vm/soft-dirty runs this on a kernel that has them.
#include "check.hpp"

#include "dirty_tracker/dirty_tracker.hpp"

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstring>
#include <set>

using namespace gpustasis;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kPages = 64;
// A round of the child's: it writes page r, page 2r + 1, and reads another.
constexpr std::size_t kRounds = 20;

std::set<std::size_t> dirty_in(const DirtyPages& pages, std::uint64_t start) {
    std::set<std::size_t> found;
    for (const PageRange& range : pages.ranges)
        for (std::uint64_t at = range.address; at < range.address + range.length; at += kPage)
            if (at >= start && at < start + kPages * kPage)
                found.insert((at - start) / kPage);
    return found;
}

[[noreturn]] void serve(int ask, int answer, volatile char* memory) {
    char round = 0;
    while (::read(ask, &round, 1) == 1) {
        const auto page = static_cast<std::size_t>(round);
        memory[page * kPage] = 1;
        memory[(2 * page + 1) * kPage] = 1;
        static_cast<void>(memory[(kPages - 1) * kPage]);
        CHECK(::write(answer, &round, 1) == 1);
    }
    ::_exit(0);
}

} // namespace

int main() {
    if (const std::string reason = why_not(DirtyBackend::soft_dirty); !reason.empty()) {
        std::printf("soft-dirty: %s\n", reason.c_str());
        CHECK_THROWS(Errc::unsupported, DirtyTracker(::getpid(), DirtyBackend::soft_dirty));
        return 0;
    }
    std::printf("soft-dirty: works here\n");
    int ask[2];
    int answer[2];
    CHECK(::pipe(ask) == 0 && ::pipe(answer) == 0);
    void* memory =
        ::mmap(nullptr, kPages * kPage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED);
    ::madvise(memory, kPages * kPage, MADV_NOHUGEPAGE);
    const pid_t child = fork_child();
    if (child == 0) {
        ::close(ask[1]);
        std::memset(memory, 7, kPages * kPage);
        CHECK(::write(answer[1], "r", 1) == 1);
        serve(ask[0], answer[1], static_cast<volatile char*>(memory));
    }
    char byte = 0;
    CHECK(::read(answer[0], &byte, 1) == 1);
    const auto start = reinterpret_cast<std::uint64_t>(memory);

    DirtyTracker tracker(child, DirtyBackend::soft_dirty);
    CHECK(dirty_in(tracker.scan(false), start).size() == kPages); // before the first mark: all
    tracker.mark();
    CHECK(dirty_in(tracker.scan(false), start).empty());
    for (std::size_t round = 0; round < kRounds; ++round) {
        byte = static_cast<char>(round);
        CHECK(::write(ask[1], &byte, 1) == 1 && ::read(answer[0], &byte, 1) == 1);
        const DirtyPages pages = tracker.scan(round % 2 == 0);
        CHECK(pages.backend == DirtyBackend::soft_dirty);
        std::set<std::size_t> expected = {round, 2 * round + 1};
        if (round % 2 != 0)
            tracker.mark();
        CHECK(dirty_in(pages, start) == expected);
        CHECK(pages.tracked_bytes >= kPages * kPage);
    }
    // The choice by itself takes what works; here that may be either.
    DirtyTracker chosen(child, std::nullopt);
    const bool can_protect = why_not(DirtyBackend::write_protect).empty();
    CHECK(chosen.backend() ==
          (can_protect ? DirtyBackend::write_protect : DirtyBackend::soft_dirty));
    CHECK(::kill(child, SIGKILL) == 0);
    CHECK(::waitpid(child, nullptr, 0) == child);
    CHECK_THROWS(Errc::gone, tracker.scan(false));
    CHECK_THROWS(Errc::gone, tracker.mark());
}
