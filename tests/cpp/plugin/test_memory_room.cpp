// SPDX-License-Identifier: Apache-2.0
// How much memory a dump takes for criu's images, so that neither a cgroup nor the host ends a process for it.
#include "check.hpp"
#include "fake_root.hpp"

#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/memory_room.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <string>
#include <vector>

using namespace gpustasis;
using sample::kMib;
using sample::kPid;
using sample::Root;

namespace {

constexpr std::uint64_t kMost = 1024 * kMib / 8 * 7; // of what Root says that the host has

void ours(const Root& root, const std::string& cgroup) {
    root.put("/proc/self/cgroup", cgroup);
}

void limit(const Root& root, const std::string& level, std::uint64_t mib, std::uint64_t used = 0) {
    root.put("/cg/v2" + level + "/memory.max", std::to_string(mib * kMib));
    root.put("/cg/v2" + level + "/memory.current", std::to_string(used * kMib));
}

void the_least_of_the_levels_of_this_process_counts() {
    const Root root;
    ours(root, "0::/pod/a/criu\n");
    CHECK(MemoryLimit(root.path()).now() == kMost);
    limit(root, "/job", 8); // another's
    CHECK(MemoryLimit(root.path()).now() == kMost);
    limit(root, "/a", 400, 80);
    CHECK(MemoryLimit(root.path()).now() == 280 * kMib);
    limit(root, "/a/criu", 80, 80);
    CHECK(MemoryLimit(root.path()).now() == 0);
    root.put("/proc/meminfo", "MemTotal: 9 kB\n");
    CHECK_THROWS(Errc::io, MemoryLimit(root.path()).now());
}

void what_is_to_be_put_back_has_its_place() {
    const Root root;
    ours(root, "0::/pod/a/criu\n");
    root.cgroups("0::/pod/a/job\n");
    limit(root, "/a", 800);
    limit(root, "/a/criu", 640);
    limit(root, "/a/job", 16);
    MemoryLimit room(root.path());
    CHECK(room.now() == 560 * kMib); // of criu's own
    room.keep_for(kPid, 100 * kMib);
    CHECK(room.now() == 560 * kMib); // 600 are left of what both have
    room.keep_for(kPid, 100 * kMib);
    CHECK(room.now() == 500 * kMib);
    limit(root, "/a", 8000);
    CHECK(room.now() == 560 * kMib);
    room.keep_for(kPid, 600 * kMib);
    CHECK(room.now() == kMost - 800 * kMib); // of the host
    room.keep_for(kPid, 1000 * kMib);
    CHECK(room.now() == 0);
}

struct statvfs room_of(int directory) {
    struct statvfs status {};
    CHECK(::fstatvfs(directory, &status) == 0);
    return status;
}

std::uint64_t bytes_of(int directory) {
    const struct statvfs status = room_of(directory);
    return status.f_blocks * status.f_frsize;
}

void a_directory_holds_what_it_may_and_no_more() {
    const sample::TempDir like;
    const UniqueFd memory = make_memory_directory(like.fd(), 8 * kMib);
    CHECK(bytes_of(memory.get()) == 8 * kMib && room_of(memory.get()).f_files == 512 + 64);
    set_memory_limit(memory.get(), 4 * kMib);
    CHECK(bytes_of(memory.get()) == 4 * kMib && room_of(memory.get()).f_files == 256 + 64);
    set_memory_limit(memory.get(), std::uint64_t{1} << 40);
    CHECK(room_of(memory.get()).f_files == (1U << 18) + 64); // a pack holds no more
    set_memory_limit(memory.get(), 0);                       // to the kernel: any number of bytes
    CHECK(bytes_of(memory.get()) == 4096 && room_of(memory.get()).f_files == 64);
    CHECK(!is_full(memory.get()));
    sample::write_file(memory.get(), "image", sample::pattern_bytes(4096));
    CHECK(is_full(memory.get()));
    set_memory_limit(memory.get(), 4 * kMib);
    sample::write_file(memory.get(), "another", sample::pattern_bytes(8192));
    CHECK_THROWS(Errc::io, set_memory_limit(memory.get(), 8192)); // less than it holds
}

void it_is_emptied_whoever_has_a_file_open() {
    const sample::TempDir like;
    const UniqueFd memory = make_memory_directory(like.fd(), 8 * kMib);
    sample::write_file(memory.get(), "image", sample::pattern_bytes(1 << 20));
    const UniqueFd open(::openat(memory.get(), "image", O_RDONLY | O_CLOEXEC));
    sample::write_file(memory.get(), "another", sample::pattern_bytes(1 << 20));
    empty_memory_directory(memory.get());
    const struct statvfs status = room_of(memory.get());
    CHECK(status.f_bfree == status.f_blocks && names_in(memory.get()).empty());
}

} // namespace

int main() {
    the_least_of_the_levels_of_this_process_counts();
    what_is_to_be_put_back_has_its_place();
    a_directory_holds_what_it_may_and_no_more();
    it_is_emptied_whoever_has_a_file_open();
}
