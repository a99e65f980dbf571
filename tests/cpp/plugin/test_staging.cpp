// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "cuda_plugin/staging.hpp"

#include <sys/mman.h>

#include <vector>

using namespace gpustasis;

namespace {

std::vector<Region> diff(const char* before, const char* after) {
    return find_staging(parse_maps(before), parse_maps(after), {});
}

constexpr std::uint32_t kReadWrite = PROT_READ | PROT_WRITE;

void a_new_mapping_is_staging() {
    const auto regions = diff("1000000-2000000 rw-p 0 00:00 0\n",
                              "1000000-2000000 rw-p 0 00:00 0\n8000000-a000000 rw-p 0 00:00 0\n");
    CHECK((regions ==
           std::vector<Region>{{0x8000000, 0x2000000, kReadWrite, RegionKind::private_anonymous}}));
}

// The kernel merges a new mapping with its neighbour: only what is new counts.
void a_grown_mapping_is_staging_where_it_grew() {
    const auto regions =
        diff("4000000-5000000 rw-p 0 00:00 0\n", "1000000-9000000 rw-p 0 00:00 0\n");
    CHECK((regions ==
           std::vector<Region>{{0x1000000, 0x3000000, kReadWrite, RegionKind::private_anonymous},
                               {0x5000000, 0x4000000, kReadWrite, RegionKind::private_anonymous}}));
}

void a_reservation_or_device_that_became_memory_is_staging() {
    const auto regions =
        diff("1000000-3000000 ---p 0 00:00 0\n5000000-6000000 rw-s 0 00:05 7 /dev/nvidia0\n",
             "1000000-2000000 ---p 0 00:00 0\n2000000-3000000 rw-p 0 00:00 0\n"
             "5000000-6000000 rw-p 0 00:00 0\n");
    CHECK(regions.size() == 2);
    CHECK(regions[0].address == 0x2000000 && regions[1].address == 0x5000000);
}

void what_is_not_memory_is_not_staging() {
    CHECK(diff("",
               "1000000-2000000 ---p 0 00:00 0\n2000000-3000000 r--p 0 08:01 9 /lib/x.so\n"
               "3000000-4000000 rw-s 0 08:01 9 /dev/shm/x\n4000000-5000000 r-xp 0 00:00 0 [vdso]\n"
               "5000000-6000000 -w-s 0 00:05 7 /dev/nvidia0\n")
              .empty());
}

void nothing_new_is_nothing() {
    const char* maps =
        "1000000-2000000 rw-p 0 00:00 0\n3000000-4000000 rw-s 0 00:01 9 /dev/zero (deleted)\n";
    CHECK(diff(maps, maps).empty());
}

void shared_memory_is_told_apart() {
    // The same address, another file: new memory although something alike was there.
    const auto regions = diff("1000000-2000000 rw-s 0 00:01 8 /dev/zero (deleted)\n",
                              "1000000-2000000 rw-s 0 00:01 9 /dev/zero (deleted)\n"
                              "2000000-3000000 rw-s 0 00:01 10 /dev/zero (deleted)\n");
    CHECK(regions.size() == 2);
    CHECK(regions[0].kind == RegionKind::shared_anonymous && regions[0].length == 0x1000000);
}

// A huge page that lies in it only in part may stay when it is dropped, as zeros.
void shared_memory_is_cut_to_whole_huge_pages() {
    const auto cut = [](const char* line) {
        const auto regions = diff("", line);
        CHECK(regions.size() <= 1);
        return regions.empty() ? Region{} : regions[0];
    };
    const auto shared = [](std::uint64_t address, std::uint64_t length) {
        return Region{address, length, kReadWrite, RegionKind::shared_anonymous};
    };
    // It is the place in the file that counts, not the address.
    CHECK(cut("1001000-1601000 rw-s 0 00:01 8 /dev/zero (deleted)\n") ==
          shared(0x1001000, 0x600000));
    CHECK(cut("1000000-1700000 rw-s 0 00:01 8 /dev/zero (deleted)\n") ==
          shared(0x1000000, 0x600000));
    CHECK(cut("1001000-1701000 rw-s 1ff000 00:01 8 /dev/zero (deleted)\n") ==
          shared(0x1002000, 0x600000));
    CHECK(cut("1000000-13ff000 rw-s 1000 00:01 8 /dev/zero (deleted)\n") ==
          shared(0x11ff000, 0x200000));
    CHECK(cut("1000000-13fe000 rw-s 1000 00:01 8 /dev/zero (deleted)\n") == Region{});
    CHECK(cut("1000000-11ff000 rw-s 0 00:01 8 /dev/zero (deleted)\n") == Region{});
    CHECK(cut("1000000-1001000 rw-s 1000 00:01 8 /dev/zero (deleted)\n") == Region{});
    // An address that is smaller than its offset in the file.
    CHECK(cut("10000-18000 rw-s 1f0000 00:01 8 /dev/zero (deleted)\n") == Region{});
    CHECK(cut("10000-1410000 rw-s 1f0000 00:01 8 /dev/zero (deleted)\n") ==
          shared(0x20000, 0x1200000));
}

void regions_split_by_protection_and_join_without() {
    const auto regions =
        diff("", "1000000-2000000 rw-p 0 00:00 0\n2000000-3000000 rw-p 0 00:00 0 [anon:a]\n"
                 "3000000-4000000 r--p 0 00:00 0\n");
    CHECK(regions.size() == 2);
    CHECK(regions[0].length == 0x2000000 && regions[1].protection == PROT_READ);
}

void what_threads_leave_behind_is_not_staging() {
    // The heap has grown; a new arena and one that has grown; a stack that is kept for later.
    CHECK(diff("1000000-2000000 rw-p 0 00:00 0 [heap]\n"
               "8000000-8400000 rw-p 0 00:00 0\n8400000-c000000 ---p 0 00:00 0\n",
               "1000000-4000000 rw-p 0 00:00 0 [heap]\n"
               "8000000-9000000 rw-p 0 00:00 0\n9000000-c000000 ---p 0 00:00 0\n"
               "10000000-10200000 rw-p 0 00:00 0\n10200000-14000000 ---p 0 00:00 0\n"
               "20000000-20001000 ---p 0 00:00 0\n20001000-20801000 rw-p 0 00:00 0\n")
              .empty());
    // Above a guard that was there before lies what the driver has made of a reservation.
    CHECK(diff("20000000-20001000 ---p 0 00:00 0\n",
               "20000000-20001000 ---p 0 00:00 0\n20001000-20801000 rw-p 0 00:00 0\n")
              .size() == 1);
}

void what_has_grown_together_with_staging_is_cut_off() {
    const auto arena = diff("", "6000000-8200000 rw-p 0 00:00 0\n8200000-c000000 ---p 0 00:00 0\n");
    CHECK((arena ==
           std::vector<Region>{{0x6000000, 0x2000000, kReadWrite, RegionKind::private_anonymous}}));
    const auto stack = diff("", "1000000-1001000 ---p 0 00:00 0\n1001000-2801000 rw-p 0 00:00 0\n");
    CHECK((stack ==
           std::vector<Region>{{0x1801000, 0x1000000, kReadWrite, RegionKind::private_anonymous}}));
}

void memory_in_use_and_small_memory_is_not_staging() {
    const std::vector<Mapping> after =
        parse_maps("1000000-2000000 rw-p 0 00:00 0\n4000000-4fff000 rw-p 0 00:00 0\n"
                   "6000000-60ff000 rw-p 0 00:00 0\n");
    const auto regions = find_staging({}, after, {0x1800000});
    CHECK(regions.size() == 1 && regions[0].address == 0x4000000);
}

} // namespace

int main() {
    a_new_mapping_is_staging();
    a_grown_mapping_is_staging_where_it_grew();
    a_reservation_or_device_that_became_memory_is_staging();
    what_is_not_memory_is_not_staging();
    nothing_new_is_nothing();
    shared_memory_is_told_apart();
    shared_memory_is_cut_to_whole_huge_pages();
    regions_split_by_protection_and_join_without();
    what_threads_leave_behind_is_not_staging();
    what_has_grown_together_with_staging_is_cut_off();
    memory_in_use_and_small_memory_is_not_staging();
}
