// SPDX-License-Identifier: Apache-2.0
// A dump of trees with little memory is to take next to no longer than by CRIU alone: what is not looked at then.
#include "check.hpp"
#include "child.hpp"
#include "own_reads.hpp"
#include "sample.hpp"

#include "core/lineage.hpp"
#include "cuda_plugin/cpu_memory.hpp"
#include "cuda_plugin/cpu_memory_dump.hpp"
#include "tracee/page_scan.hpp"
#include "tracee/proc.hpp"

#include <sys/mman.h>
#include <sys/ptrace.h>
#include <sys/wait.h>

#include <algorithm>
#include <csignal>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;
// More than what addresses in use beside it can leave to CRIU.
constexpr std::size_t kSome = 3 * kMiB;

void use_memory(std::size_t size) {
    void* memory =
        ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    CHECK(memory != MAP_FAILED && ::madvise(memory, size, MADV_NOHUGEPAGE) == 0);
    std::memset(memory, 1, size);
}

/// A process and its children, each with so much memory of its own, and stopped as by criu.
class Tree {
public:
    explicit Tree(std::size_t size, int children = 0) {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        root_ = std::make_unique<Child>([&] {
            for (int i = 0; i < children; ++i)
                if (fork_child() == 0) {
                    use_memory(size);
                    const pid_t pid = ::getpid();
                    CHECK(::write(ends[1], &pid, sizeof pid) == sizeof pid);
                    for (;;)
                        ::pause();
                }
            use_memory(size);
        });
        pids_.push_back(root_->pid());
        for (int i = 0; i < children; ++i)
            CHECK(::read(ends[0], &pids_.emplace_back(), sizeof(pid_t)) == sizeof(pid_t));
        ::close(ends[0]);
        ::close(ends[1]);
        for (const pid_t pid : pids_)
            for (const pid_t tid : proc::threads(pid)) { // a sanitizer may have one there as well
                CHECK(::ptrace(PTRACE_SEIZE, tid, nullptr, nullptr) == 0);
                CHECK(::ptrace(PTRACE_INTERRUPT, tid, nullptr, nullptr) == 0);
                CHECK(::waitpid(tid, nullptr, __WALL) == tid);
            }
    }
    Tree(const Tree&) = delete;
    Tree& operator=(const Tree&) = delete;
    ~Tree() {
        for (const pid_t pid : pids_) // dead, each is there until its tracer has waited for it
            if (pid != root_->pid() && ::kill(pid, SIGKILL) == 0)
                ::waitpid(pid, nullptr, __WALL);
    }
    const std::vector<pid_t>& pids() const { return pids_; }

private:
    std::unique_ptr<Child> root_;
    std::vector<pid_t> pids_;
};

/// One dump of a tree.
struct Dumped {
    explicit Dumped(const Tree& tree, const Config& config = ours()) {
        Lineage lineage(directory.fd());
        DumpImages images(config, directory.fd(), lineage, statistics);
        std::optional<HiddenPages> pages;
        CpuMemoryDump dump(config, images, statistics, pages);
        dump.prepare();
        for (const pid_t pid : tree.pids()) {
            CHECK(!dump.is_complete());
            dump.add(pid, {});
        }
        CHECK(dump.is_complete());
        const std::uint64_t before = own_reads("rchar");
        taken = dump.take([] {},
                          [&](const CpuMemoryDump::Noted& noted) {
                              ++times_noted;
                              entries += noted.size();
                          });
        read = own_reads("rchar") - before;
        dump.finish(false);
    }
    static Config ours() {
        Config config;
        config.cpu_memory = CpuMemory::ours;
        return config;
    }

    sample::TempDir directory;
    Statistics statistics;
    bool taken = false;
    int times_noted = 0;
    std::size_t entries = 0;
    std::uint64_t read = 0; ///< bytes
};

#if !defined(__SANITIZE_THREAD__) // each process has much memory of the sanitizer's then
/// All of it, and the kernel is not made to go through all pages for the flags of the mappings.
void is_left_without_a_look_at_flags(std::size_t size, CpuMemory wish) {
    const Tree tree(size);
    Config config;
    config.cpu_memory = wish;
    const Dumped dumped(tree, config);
    CHECK(!dumped.taken && dumped.times_noted == 0 && dumped.directory.empty());
    CHECK(dumped.statistics.cpu_memory.at(0).left_because == "there is little of it");
    const std::string smaps = "/proc/" + std::to_string(tree.pids()[0]) + "/smaps";
    CHECK(dumped.read < proc::read_file(smaps).size());
}

void all_tasks_of_a_tree_are_noted_at_once() {
    const Dumped dumped(Tree(kSome, 1));
    CHECK(dumped.taken && dumped.times_noted == 1 && dumped.entries == 2);
    for (const CpuMemoryStatistics& told : dumped.statistics.cpu_memory)
        CHECK(told.left_because.empty() && told.bytes > 0);
}
#endif

/// Untouched, written, read (there the kernel has its page of zeros), and with a child, which shares it.
void only_pages_that_are_its_own_are_found() {
    constexpr std::size_t kOther =
        64 * kMiB; // the kernel is asked in another way than for a small mapping
    for (const std::size_t size : {4 * kMiB, kOther}) {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        const Child task([&] {
            void* memory =
                ::mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
            CHECK(memory != MAP_FAILED && ::madvise(memory, size, MADV_NOHUGEPAGE) == 0);
            auto* bytes = static_cast<volatile char*>(memory);
            for (std::size_t at = 0; at < kMiB; at += 4096) {
                bytes[kMiB + at] = 1;
                static_cast<void>(bytes[2 * kMiB + at]);
                bytes[3 * kMiB + at] = 1;
            }
            if (fork_child() == 0)
                for (;;)
                    ::pause();
            for (std::size_t at = 0; at < kMiB; at += 4096)
                bytes[kMiB + at] = 2;
            const auto at = reinterpret_cast<std::uintptr_t>(memory);
            CHECK(::write(ends[1], &at, sizeof at) == sizeof at);
        });
        std::uint64_t address = 0;
        CHECK(::read(ends[0], &address, sizeof address) == sizeof address);
        ::close(ends[0]);
        ::close(ends[1]);
        std::vector<Mapping> mappings = read_maps(task.pid());
        std::erase_if(mappings, [&](const Mapping& mapping) {
            return address < mapping.start || mapping.end <= address;
        });
        CHECK(mappings.size() == 1);
        const std::uint64_t end = address + size;
        // The kernel may have joined it with others.
        mappings[0].start = std::max(mappings[0].start, address);
        mappings[0].end = std::min(mappings[0].end, end);
        CHECK((find_own_pages(task.pid(), mappings) ==
               std::vector{Region{address + kMiB, kMiB, PROT_READ | PROT_WRITE,
                                  RegionKind::private_anonymous}}));
    }
}

} // namespace

int main() {
    if (const std::string why_not = why_no_page_scan(); !why_not.empty()) {
        std::fprintf(stderr, "cannot be run: %s\n", why_not.c_str());
        return 1;
    }
    only_pages_that_are_its_own_are_found();
#if !defined(__SANITIZE_THREAD__)
    is_left_without_a_look_at_flags(kMiB / 2, CpuMemory::ours);
    is_left_without_a_look_at_flags(kSome, CpuMemory::automatic);
    all_tasks_of_a_tree_are_noted_at_once();
#endif
}
