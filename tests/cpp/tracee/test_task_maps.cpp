// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include "tracee/task_maps.hpp"

#include <sys/mman.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>

using namespace gpustasis;

namespace {

void every_field_is_read() {
    const auto maps =
        parse_maps("00400000-00452000 r-xp 00001000 08:02 173521      /usr/bin/a b\n"
                   "7f0000000000-7f0000200000 rw-s 00000000 00:01 6182 /dev/zero (deleted)\n"
                   "200000000-400200000 ---p 00000000 00:00 0 \n"
                   "7f0000400000-7f0000401000 rw-p 00000000 00:00 0\n");
    CHECK(maps.size() == 4);
    CHECK(maps[0].start == 0x400000 && maps[0].end == 0x452000);
    CHECK(maps[0].protection == (PROT_READ | PROT_EXEC));
    CHECK(!maps[0].shared && maps[0].inode == 173521 && maps[0].name == "/usr/bin/a b");
    CHECK(!maps[0].is_private_anonymous() && !maps[0].is_shared_anonymous());
    CHECK(maps[0].device == makedev(8, 2) && maps[1].device == makedev(0, 1) &&
          maps[2].device == 0);
    CHECK(maps[0].offset == 0x1000 && maps[1].offset == 0);
    CHECK(maps[1].shared && maps[1].is_shared_anonymous() && !maps[1].is_private_anonymous());
    CHECK(maps[2].protection == PROT_NONE && maps[2].is_private_anonymous());
    CHECK(maps[3].is_private_anonymous() && maps[3].name.empty());
}

void names_in_brackets_are_anonymous_only_if_they_are() {
    const auto maps = parse_maps("1000-2000 rw-p 00000000 00:00 0 [heap]\n"
                                 "2000-3000 rw-p 00000000 00:00 0 [anon:staging]\n"
                                 "3000-4000 rw-p 00000000 00:00 0 [stack]\n"
                                 "4000-5000 r-xp 00000000 00:00 0 [vdso]\n");
    CHECK(maps[0].is_private_anonymous());
    CHECK(maps[1].is_private_anonymous());
    CHECK(!maps[2].is_private_anonymous());
    CHECK(!maps[3].is_private_anonymous());
}

void garbage_is_an_error() {
    for (const char* line : {"x", "1000", "1000-2000", "1000-2000 rw", "1000-2000 rw-p",
                             "1000-2000 rw-p 0 00:00 x", "1000-2000 rwp 0 00:00 0 "})
        CHECK_THROWS(Errc::corrupt_data, parse_maps(line));
}

void this_process_can_be_read() {
    void* page = ::mmap(nullptr, 4096, PROT_READ, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    const auto maps = read_maps(::getpid());
    CHECK(std::ranges::is_sorted(maps, {}, &Mapping::start));
    const auto found =
        std::ranges::find(maps, reinterpret_cast<std::uint64_t>(page), &Mapping::start);
    CHECK(found != maps.end() && found->is_shared_anonymous());
}

} // namespace

int main() {
    every_field_is_read();
    names_in_brackets_are_anonymous_only_if_they_are();
    garbage_is_an_error();
    this_process_can_be_read();
}
