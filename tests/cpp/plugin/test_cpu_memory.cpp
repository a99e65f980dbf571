// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "core/unique_fd.hpp"
#include "cuda_plugin/cpu_memory.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <string>
#include <utility>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kStart = 0x10000000;

Region run(std::uint64_t address, std::uint64_t length) {
    return {address, length, PROT_READ | PROT_WRITE, RegionKind::private_anonymous};
}

std::vector<Region> whole(std::uint64_t start, std::uint64_t end) {
    return {run(start, end - start)};
}

/// Of 16 MiB at kStart.
std::vector<Mapping> mapping(const std::string& permissions = "rw-p", const std::string& name = "",
                             const std::string& flags = "rd wr mr mw me ac",
                             const std::string& inode = "0") {
    return parse_smaps("10000000-11000000 " + permissions + " 00000000 00:00 " + inode + " " +
                       name + "\nSize: 16384 kB\nVmFlags: " + flags + "\n");
}

std::vector<Region> choose(const std::vector<Mapping>& mappings,
                           const std::vector<std::uint64_t>& in_use = {},
                           const std::vector<Region>& staging = {}) {
    return choose_cpu_memory(mappings, in_use, staging, whole);
}

void memory_and_the_heap_are_taken() {
    for (const char* name : {"", "[heap]", "[anon:arena]"})
        CHECK((choose(mapping("rw-p", name)) == std::vector{run(kStart, 16 * kMiB)}));
}

void what_is_no_plain_memory_is_left() {
    for (const char* permissions : {"r--p", "---p", "rwxp", "r-xp", "-w-p", "rw-s"})
        CHECK(choose(mapping(permissions)).empty());
    for (const char* name : {"[stack]", "[vdso]"})
        CHECK(choose(mapping("rw-p", name)).empty());
    CHECK(choose(mapping("rw-p", "/tmp/file", "rd wr", "77")).empty());
    for (const char* flag : {"lo", "lf", "ht", "io", "pf", "um", "uw", "wf", "dc", "gd", "ss"})
        CHECK(choose(mapping("rw-p", "", std::string("rd wr ") + flag + " ac")).empty());
    CHECK(choose(mapping("rw-p", "", "")).empty()); // a kernel that tells no flags
    CHECK(!choose(mapping("rw-p", "", "rd wr nh hg sd dd mg")).empty());
}

void small_mappings_are_left() {
    CHECK(choose(parse_smaps("10000000-100ff000 rw-p 0 00:00 0\nVmFlags: rd wr\n")).empty());
    CHECK(!choose(parse_smaps("10000000-10100000 rw-p 0 00:00 0\nVmFlags: rd wr\n")).empty());
}

void a_window_around_what_is_in_use_is_left() {
    const std::uint64_t address = kStart + 5 * kMiB + 123;
    CHECK((choose(mapping(), {address}) ==
           std::vector{run(kStart, 4 * kMiB), run(kStart + 6 * kMiB, 10 * kMiB)}));
    // Two windows that overlap, one at the beginning, one from outside, and one near zero.
    CHECK((choose(mapping(), {kStart, kStart + kMiB, kStart - kMiB / 2, 5}) ==
           std::vector{run(kStart + 2 * kMiB, 14 * kMiB)}));
    CHECK((choose(mapping(), {kStart + 16 * kMiB}) == std::vector{run(kStart, 15 * kMiB)}));
    // Whatever a register holds that is no address, the other windows stay.
    for (const std::uint64_t last : {~std::uint64_t{0}, ~std::uint64_t{0} - kMiB})
        CHECK((choose(mapping(), {last, kStart}) == std::vector{run(kStart + kMiB, 15 * kMiB)}));
}

void staging_is_left() {
    CHECK((choose(mapping(), {}, {run(kStart + kMiB, 14 * kMiB)}) ==
           std::vector{run(kStart, kMiB), run(kStart + 15 * kMiB, kMiB)}));
}

void only_runs_that_are_there_and_large_enough_are_taken() {
    const auto find = [](std::uint64_t start, std::uint64_t) {
        return std::vector{run(start, kMinCpuRun), run(start + kMiB, kMinCpuRun - 4096),
                           run(start + 2 * kMiB, kMiB)};
    };
    CHECK((choose_cpu_memory(mapping(), {}, {}, find) ==
           std::vector{run(kStart, kMinCpuRun), run(kStart + 2 * kMiB, kMiB)}));
    // What a window leaves of a run is too small.
    CHECK((choose_cpu_memory(mapping(), {kStart + 3 * kMiB + 4096}, {}, find) ==
           std::vector{run(kStart, kMinCpuRun)}));
}

void of_memory_for_huge_pages_only_whole_ones_are_taken() {
    const auto find = [](std::uint64_t start, std::uint64_t) {
        return std::vector{run(start, kMinCpuRun), run(start + 2 * kMiB, kMinCpuRun),
                           run(start + 3 * kMiB, 6 * kMiB), run(start + 10 * kMiB, 2 * kMiB)};
    };
    CHECK((choose_cpu_memory(mapping("rw-p", "", "rd wr hg"), {}, {}, find) ==
           std::vector{run(kStart + 4 * kMiB, 4 * kMiB), run(kStart + 10 * kMiB, 2 * kMiB)}));
    CHECK(choose_cpu_memory(mapping("rw-p", "", "rd wr"), {}, {}, find).size() == 4);
    // A window cuts a huge page.
    CHECK((choose(mapping("rw-p", "", "rd wr hg"), {kStart + 5 * kMiB + 4096}) ==
           std::vector{run(kStart, 4 * kMiB), run(kStart + 8 * kMiB, 8 * kMiB)}));
}

void a_device_that_is_not_known_leaves_all() {
    for (const unsigned known : {3U, 5U, 7U, 8U, 9U})
        CHECK(is_harmless_device(makedev(1, known), "/dev/some"));
    for (const auto& [major_number, minor_number] :
         {std::pair{4U, 1U}, {5U, 0U}, {5U, 1U}, {5U, 2U}, {136U, 3U}, {10U, 200U}, {10U, 229U}})
        CHECK(is_harmless_device(makedev(major_number, minor_number), "/dev/some"));
    CHECK(is_harmless_device(makedev(195, 0), "/dev/nvidia0"));
    for (const auto& [major_number, minor_number] :
         {std::pair{1U, 1U}, {10U, 196U}, {195U, 0U}, {226U, 128U}, {231U, 0U}, {5U, 3U}})
        CHECK(!is_harmless_device(makedev(major_number, minor_number), "/dev/dri/renderD128"));
    const std::vector<Mapping> own = read_maps_with_flags(::getpid());
    const UniqueFd null(::open("/dev/null", O_RDONLY | O_CLOEXEC));
    CHECK(bool(null) && why_written_by_device(::getpid(), own).empty());
    const auto mapped = [](const std::string& name, const std::string& flags) {
        return why_written_by_device(::getpid(), mapping("rw-s", name, flags, "77"));
    };
    CHECK(mapped("/dev/dri/card0", "rd wr io pf").find("/dev/dri/card0") != std::string::npos);
    CHECK(mapped("/dev/nvidiactl", "rd wr io pf").empty());
    CHECK(mapped("/tmp/file", "rd wr").empty());
    CHECK(mapped("[vvar]", "rd io pf").empty());
    CHECK(!mapped("/[aio] (deleted)", "rd wr").empty());
}

void beyond_the_bound_the_smallest_runs_are_left() {
    const auto find = [](std::uint64_t start, std::uint64_t) {
        std::vector<Region> runs;
        for (std::size_t i = 0; i < kMaxCpuRegions + 10; ++i)
            runs.push_back(run(start + i * kMiB, kMinCpuRun + (i % 100 == 7 ? 0 : 4096)));
        return runs;
    };
    const auto chosen = choose_cpu_memory(mapping(), {}, {}, find);
    CHECK(chosen.size() == kMaxCpuRegions);
    std::size_t small = 0;
    for (std::size_t i = 0; i < chosen.size(); ++i) {
        small += chosen[i].length == kMinCpuRun ? 1U : 0U;
        CHECK(i == 0 || chosen[i - 1].address < chosen[i].address);
    }
    CHECK(small == (kMaxCpuRegions + 10 + 92) / 100 - 10);
}

} // namespace

int main() {
    memory_and_the_heap_are_taken();
    what_is_no_plain_memory_is_left();
    small_mappings_are_left();
    a_window_around_what_is_in_use_is_left();
    staging_is_left();
    only_runs_that_are_there_and_large_enough_are_taken();
    of_memory_for_huge_pages_only_whole_ones_are_taken();
    a_device_that_is_not_known_leaves_all();
    beyond_the_bound_the_smallest_runs_are_left();
}
