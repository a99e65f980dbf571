// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/unique_fd.hpp"
#include "cuda_plugin/cpu_memory.hpp"
#include "cuda_plugin/shared_memory.hpp"
#include "cuda_plugin/shared_source.hpp"

#include <fcntl.h>
#include <sys/ipc.h>
#include <sys/mman.h>
#include <sys/shm.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint64_t kMiB = 1 << 20;
constexpr std::uint64_t kStart = 0x10000000;
constexpr SharedFileId kFile{.device = 26, .inode = 77};
const std::string kAnonymous = "/dev/zero (deleted)";

/// `mib` MiB at `address`, of the file from `offset` on.
Mapping mapping(std::uint64_t address, std::uint64_t mib, std::uint64_t offset = 0,
                std::uint32_t protection = PROT_READ | PROT_WRITE) {
    Mapping made;
    made.start = address;
    made.end = address + mib * kMiB;
    made.protection = protection;
    made.shared = true;
    made.device = kFile.device;
    made.inode = kFile.inode;
    made.offset = offset;
    made.name = kAnonymous;
    made.flags = {"rd", "wr", "sh"};
    return made;
}

SharingTask task(pid_t pid, std::vector<Mapping> mappings) {
    return {.pid = pid, .mappings = std::move(mappings), .in_use = {}, .staging = {}};
}

std::map<SharedFileId, SharedFile> file(std::uint64_t size, std::vector<AddressRange> data) {
    std::map<SharedFileId, SharedFile> files;
    files.emplace(kFile, SharedFile{.fd = {}, .size = size, .data = std::move(data)});
    return files;
}

/// What an image is to hold: task, address, length, offset.
using Part = std::tuple<pid_t, std::uint64_t, std::uint64_t, std::uint64_t>;

std::vector<Part> choose(const std::vector<SharingTask>& tasks,
                         const std::map<SharedFileId, SharedFile>& files) {
    std::vector<Part> chosen;
    for (const SharedPart& part : choose_shared_memory(tasks, files)) {
        CHECK(part.region.kind == RegionKind::shared_anonymous && part.file == kFile &&
              part.region.protection == (PROT_READ | PROT_WRITE));
        chosen.emplace_back(part.pid, part.region.address, part.region.length, part.offset);
    }
    return chosen;
}

void names_tell_shared_memory() {
    for (const char* name : {"/dev/zero (deleted)", "/memfd:any (deleted)", "[anon_shmem:any]",
                             "/memfd:/dev/zero (deleted)", "/dev/shm/any (deleted)"}) {
        Mapping one = mapping(kStart, 1);
        one.name = name;
        CHECK(maps_shared_memory(one));
        one.inode = 0;
        CHECK(!maps_shared_memory(one));
    }
    for (const char* name : {"", "/dev/shm/any", "/memfd:any", "/dev/zero", "any (deleted)"}) {
        Mapping one = mapping(kStart, 1);
        one.name = name;
        CHECK(!maps_shared_memory(one));
    }
}

void files_of_one_number_on_two_file_systems_are_two() {
    const Mapping plain = mapping(kStart, 2);
    Mapping other = mapping(2 * kStart, 2);
    ++other.device;
    other.protection |= PROT_EXEC;
    const std::vector tasks{task(1, {plain, other})};
    CHECK(find_shared_candidates(tasks) == std::vector{kFile});
    CHECK((choose(tasks, file(2 * kMiB, {{0, 2 * kMiB}})) ==
           std::vector<Part>{{1, kStart, 2 * kMiB, 0}}));
}

void one_mapping_that_is_not_plain_leaves_all() {
    const Mapping plain = mapping(kStart, 2);
    CHECK(find_shared_candidates({task(1, {plain})}) == std::vector{kFile});
    CHECK(find_shared_candidates({task(1, {plain}), task(2, {mapping(kStart, 1, 0, PROT_READ)})}) ==
          std::vector{kFile});
    const auto left = [&](const Mapping& other) {
        return find_shared_candidates({task(1, {plain}), task(2, {other})}).empty();
    };
    Mapping other = plain;
    other.shared = false;
    CHECK(left(other));
    CHECK(left(mapping(kStart, 1, 0, PROT_READ | PROT_EXEC)));
    for (const char* flag : {"lo", "uw", "um", "io", "pf", "dc"}) {
        other = plain;
        other.flags.emplace_back(flag);
        CHECK(left(other));
    }
    other = plain;
    other.flags.clear(); // a kernel that tells none
    CHECK(left(other));
    SharingTask staged = task(2, {plain});
    staged.staging = {{kStart + kMiB, 4096, PROT_READ | PROT_WRITE, RegionKind::shared_anonymous}};
    CHECK(find_shared_candidates({task(1, {plain}), staged}).empty());
    staged.staging[0].address = kStart + 2 * kMiB; // behind it
    CHECK(!find_shared_candidates({task(1, {plain}), staged}).empty());
}

void what_is_small_or_written_by_nobody_is_left() {
    CHECK(find_shared_candidates({task(1, {mapping(kStart, 2, 0, PROT_READ)})}).empty());
    Mapping small = mapping(kStart, 1);
    small.end -= 4096;
    CHECK(find_shared_candidates({task(1, {small})}).empty());
    CHECK(choose({task(1, {small})}, file(kMiB, {{0, kMiB}})).empty());
}

void each_part_is_stored_once() {
    const auto data = file(4 * kMiB, {{0, 4 * kMiB}});
    CHECK((choose({task(1, {mapping(kStart, 4)}), task(2, {mapping(kStart, 4)})}, data) ==
           std::vector<Part>{{1, kStart, 4 * kMiB, 0}}));
    // What the first does not map, or not to write, is the next one's.
    const std::vector<SharingTask> tasks = {
        task(1, {mapping(kStart, 2, kMiB), mapping(kStart + 8 * kMiB, 1, 0, PROT_READ)}),
        task(2, {mapping(2 * kStart, 4)})};
    CHECK((choose(tasks, data) == std::vector<Part>{{1, kStart, 2 * kMiB, kMiB},
                                                    {2, 2 * kStart, kMiB, 0},
                                                    {2, 2 * kStart + 3 * kMiB, kMiB, 3 * kMiB}}));
    // Mapped twice by one task.
    CHECK(
        (choose({task(1, {mapping(kStart, 3), mapping(2 * kStart, 4)})}, data) ==
         std::vector<Part>{{1, kStart, 3 * kMiB, 0}, {1, 2 * kStart + 3 * kMiB, kMiB, 3 * kMiB}}));
}

void only_large_runs_of_data_within_the_file_are_stored() {
    const auto tasks = std::vector{task(1, {mapping(kStart, 4)})};
    CHECK((choose(tasks, file(4 * kMiB, {{0, kMinCpuRun},
                                         {kMiB, kMiB + kMinCpuRun - 4096},
                                         {2 * kMiB, 3 * kMiB}})) ==
           std::vector<Part>{{1, kStart, kMinCpuRun, 0}, {1, kStart + 2 * kMiB, kMiB, 2 * kMiB}}));
    // The last page, of which the file has a part, is CRIU's; the mapping reaches beyond the file.
    CHECK((choose(tasks, file(2 * kMiB + 5, {{0, 2 * kMiB + 5}})) ==
           std::vector<Part>{{1, kStart, 2 * kMiB, 0}}));
    CHECK(choose(tasks, file(0, {})).empty());
    CHECK(choose(tasks, {}).empty()); // it could not be opened
}

void a_window_around_what_any_task_uses_is_left() {
    const auto data = file(8 * kMiB, {{0, 8 * kMiB}});
    SharingTask other = task(2, {mapping(2 * kStart, 4, 4 * kMiB)});
    other.in_use = {2 * kStart + 2 * kMiB + 5}; // at 6 MiB of the file
    CHECK((choose({task(1, {mapping(kStart, 8)}), other}, data) ==
           std::vector<Part>{{1, kStart, 5 * kMiB, 0}, {1, kStart + 7 * kMiB, kMiB, 7 * kMiB}}));
}

void of_memory_for_huge_pages_only_whole_ones_are_stored() {
    const auto data = file(8 * kMiB, {{kMiB, 5 * kMiB}});
    Mapping advised = mapping(2 * kStart, 4);
    advised.flags.emplace_back("hg");
    CHECK((choose({task(1, {mapping(kStart, 8)}), task(2, {advised})}, data) ==
           std::vector<Part>{{1, kStart + 2 * kMiB, 2 * kMiB, 2 * kMiB}}));
}

void of_a_file_system_with_huge_pages_only_whole_ones_are_stored() {
    auto files = file(8 * kMiB, {{kMiB, 5 * kMiB}});
    files.at(kFile).block = kHugePage;
    CHECK((choose({task(1, {mapping(kStart, 8)})}, files) ==
           std::vector<Part>{{1, kStart + 2 * kMiB, 2 * kMiB, 2 * kMiB}}));
}

/// This process as a tree.
std::vector<SharingTask> own_tree() {
    return {{.pid = ::getpid(),
             .mappings = read_maps_with_flags(::getpid()),
             .in_use = {},
             .staging = {}}};
}

UniqueFd make_memfd() {
    return UniqueFd(::memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
}

/// A file without a name, on the tmpfs that each system has.
UniqueFd make_removed_file() {
    const std::string path = "/dev/shm/gpustasis-test-" + std::to_string(::getpid());
    UniqueFd fd(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0600));
    CHECK(bool(fd) && ::unlink(path.c_str()) == 0);
    return fd;
}

/// 2 MiB, mapped, the first MiB data.
struct Mapped {
    explicit Mapped(UniqueFd file = make_memfd()) : fd(std::move(file)) {
        CHECK(bool(fd) && ::ftruncate(fd.get(), 2 * kMiB) == 0);
        at = ::mmap(nullptr, 2 * kMiB, PROT_READ | PROT_WRITE, MAP_SHARED, fd.get(), 0);
        CHECK(at != MAP_FAILED);
        std::fill_n(static_cast<volatile char*>(at), kMiB, 'x');
    }
    Mapped(const Mapped&) = delete;
    Mapped& operator=(const Mapped&) = delete;
    ~Mapped() { ::munmap(at, 2 * kMiB); }
    UniqueFd fd;
    void* at;
};

std::vector<std::string> reasons;
std::map<SharedFileId, SharedFile> open_own() {
    reasons.clear();
    return open_shared_files(own_tree(), [](const std::string& why) { reasons.push_back(why); });
}

void files_are_opened_with_their_data() {
    for (UniqueFd (*make)() : {&make_memfd, &make_removed_file}) {
        const Mapped mapped(make());
        const auto files = open_own();
        CHECK(files.size() == 1 && reasons.empty());
        const SharedFile& found = files.begin()->second;
        CHECK(found.size == 2 * kMiB && (found.data == std::vector<AddressRange>{{0, kMiB}}));
        CHECK(choose_shared_memory(own_tree(), files).size() == 1);
    }
}

void files_that_got_a_name_are_left() {
    const std::string other = "/dev/shm/gpustasis-test-other-" + std::to_string(::getpid());
    UniqueFd file(::open("/dev/shm", O_TMPFILE | O_RDWR | O_CLOEXEC, 0600));
    CHECK(bool(file));
    const std::string link = "/proc/self/fd/" + std::to_string(file.get());
    const Mapped named(std::move(file));
    CHECK(open_own().size() == 1);
    CHECK(::linkat(AT_FDCWD, link.c_str(), AT_FDCWD, other.c_str(), AT_SYMLINK_FOLLOW) == 0);
    const auto found = open_own();
    CHECK(::unlink(other.c_str()) == 0);
    CHECK(found.empty() && reasons.size() == 1 && reasons[0].ends_with(" has another name still"));
}

void files_on_disks_are_left() {
    const sample::TempDir directory("/var/tmp");
    UniqueFd file(::openat(directory.fd(), "file", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    CHECK(bool(file) && ::unlinkat(directory.fd(), "file", 0) == 0);
    const Mapped mapped(std::move(file));
    CHECK(open_own().empty());
    CHECK(reasons.size() == 1 &&
          reasons[0].find("is on no tmpfs that process") != std::string::npos);
}

void system_v_memory_is_left() {
    const int first =
        ::shmget(IPC_PRIVATE, 4096, IPC_CREAT | 0600); // can have number 0, as no file has
    const int id = ::shmget(IPC_PRIVATE, 2 * kMiB, IPC_CREAT | 0600);
    CHECK(first >= 0 && ::shmctl(first, IPC_RMID, nullptr) == 0);
    void* at = id < 0 ? nullptr : ::shmat(id, nullptr, 0);
    CHECK(id >= 0 && ::shmctl(id, IPC_RMID, nullptr) == 0 && at != nullptr);
    CHECK(open_own().empty());
    CHECK(reasons.size() == 1 && reasons[0].ends_with("it is System V memory"));
    CHECK(::shmdt(at) == 0);
}

/// Whether the page is in the page table of this process.
bool is_touched(const void* address) {
    const UniqueFd pagemap(::open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC));
    std::uint64_t entry = 0;
    const auto page = reinterpret_cast<std::uint64_t>(address) / 4096;
    CHECK(::pread(pagemap.get(), &entry, sizeof entry, static_cast<off_t>(page * sizeof entry)) ==
          sizeof entry);
    return entry >> 63 != 0;
}

void what_a_task_has_not_touched_is_read_without_it() {
    const Mapped mapped;
    std::vector<std::byte> content(kMiB);
    for (std::size_t i = 0; i < content.size(); ++i)
        content[i] = static_cast<std::byte>(i / 7);
    CHECK(::pwrite(mapped.fd.get(), content.data(), kMiB, 0) == static_cast<ssize_t>(kMiB));
    CHECK(::madvise(mapped.at, kMiB, MADV_DONTNEED) == 0); // of this process, not of the file
    const auto files = open_own();
    const std::vector<SharedPart> parts = choose_shared_memory(own_tree(), files);
    CHECK(parts.size() == 1 && !is_touched(mapped.at));
    SharedSource source(::getpid(), parts, files);
    std::vector<std::byte> found(kMiB - 8192);
    source.read(parts[0].region.address + 8192, found);
    CHECK(std::ranges::equal(found, std::span(content).subspan(8192)));
    CHECK(!is_touched(static_cast<char*>(mapped.at) + 8192));
    std::vector<std::byte> own(4096); // in no part
    source.read(reinterpret_cast<std::uint64_t>(content.data()), own);
    CHECK(std::ranges::equal(own, std::span(content).first(4096)));
}

void sealed_files_are_left() {
    for (const int seal : {0x2, 0x10}) { // F_SEAL_SHRINK, F_SEAL_FUTURE_WRITE
        const Mapped mapped;
        CHECK(::fcntl(mapped.fd.get(), 1033, seal) == 0); // F_ADD_SEALS
        const bool taken = seal == 0x2;
        CHECK(open_own().size() == (taken ? 1U : 0U));
        CHECK(taken || reasons.at(0).ends_with("it is sealed against writing"));
    }
}

void what_another_process_uses_is_left(UniqueFd file, bool mapped_there) {
    const Mapped mapped(std::move(file));
    int ends[2];
    int said[2];
    CHECK(::pipe(ends) == 0 && ::pipe(said) == 0);
    const pid_t child = fork_child(); // has the mapping or the descriptor
    if (child == 0) {
        ::close(ends[1]);
        if (mapped_there) { // and touched: the kernel counts that
            ::close(mapped.fd.get());
            CHECK(*static_cast<volatile char*>(mapped.at) == 'x');
        } else {
            ::munmap(mapped.at, 2 * kMiB);
        }
        CHECK(::write(said[1], "", 1) == 1);
        char byte;
        ::_exit(::read(ends[0], &byte, 1) == 0 ? 0 : 1);
    }
    char byte;
    CHECK(::read(said[0], &byte, 1) == 1);
    CHECK(open_own().empty());
    CHECK(reasons.at(0).ends_with("process " + std::to_string(child) +
                                  ", outside of the tree, uses it"));
    // As one of the tree it is no stranger.
    std::vector<SharingTask> tree = own_tree();
    tree.push_back(task(child, read_maps_with_flags(child)));
    reasons.clear();
    const auto both =
        open_shared_files(tree, [](const std::string& why) { reasons.push_back(why); });
    CHECK(both.size() == 1 && choose_shared_memory(tree, both).size() == 1);
    ::close(ends[1]);
    ::close(said[0]);
    ::close(said[1]);
    CHECK(::waitpid(child, nullptr, 0) == child);
    ::close(ends[0]);
    CHECK(open_own().size() == 1);
}

} // namespace

int main() {
    names_tell_shared_memory();
    one_mapping_that_is_not_plain_leaves_all();
    what_is_small_or_written_by_nobody_is_left();
    each_part_is_stored_once();
    only_large_runs_of_data_within_the_file_are_stored();
    a_window_around_what_any_task_uses_is_left();
    files_of_one_number_on_two_file_systems_are_two();
    of_memory_for_huge_pages_only_whole_ones_are_stored();
    of_a_file_system_with_huge_pages_only_whole_ones_are_stored();
    files_are_opened_with_their_data();
    what_a_task_has_not_touched_is_read_without_it();
    sealed_files_are_left();
    files_that_got_a_name_are_left();
    files_on_disks_are_left();
    system_v_memory_is_left();
    for (const bool mapped_there : {true, false}) {
        what_another_process_uses_is_left(make_memfd(), mapped_there);
        what_another_process_uses_is_left(make_removed_file(), mapped_there);
    }
}
