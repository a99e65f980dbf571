// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "core/image_writer.hpp"
#include "core/process_memory.hpp"
#include "core/unique_fd.hpp"
#include "dropped_memory/refill.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::uint32_t kReadWrite = PROT_READ | PROT_WRITE;
constexpr std::size_t kPage = 4096;

void refill_wants_the_mapping_that_was_there() {
    constexpr std::size_t kSize = 1 << 20;
    auto* memory = static_cast<std::byte*>(
        ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    std::memset(memory + 4096, 7, kSize / 2);
    ImageInfo info;
    info.pid = 1;
    info.regions = {{reinterpret_cast<std::uint64_t>(memory), kSize, kReadWrite,
                     RegionKind::private_anonymous}};
    ProcessMemory self(::getpid());
    const sample::TempDir dir;
    write_image(dir.fd(), "x.img", info, self, {.threads = 2});
    const ImageReader image = ImageReader::open(dir.fd(), "x.img");

    // Fresh: as CRIU restores it after a drop. Then used: what lies there is overwritten.
    CHECK(::madvise(memory, kSize, MADV_DONTNEED) == 0);
    for (int round = 0; round < 2; ++round) {
        refill(::getpid(), image, 2);
        for (std::size_t i = 0; i < kSize; ++i)
            CHECK(memory[i] == std::byte(i >= 4096 && i < 4096 + kSize / 2 ? 7 : 0));
        std::memset(memory, 9, kSize);
    }

    CHECK(::mprotect(memory + 8192, 4096, PROT_READ) == 0);
    CHECK_THROWS(Errc::corrupt_data, refill(::getpid(), image, 2));
    CHECK(::munmap(memory, kSize) == 0);
    CHECK_THROWS(Errc::corrupt_data, refill(::getpid(), image, 2));
}

/// Two chunks of private memory and two of a memfd, of each the second one zeros.
void refill_fills_shared_memory_too() {
    constexpr std::size_t kChunk = std::size_t{256} << 10;
    constexpr std::size_t kSize = 2 * kChunk;
    const UniqueFd memfd(::memfd_create("test", MFD_CLOEXEC));
    CHECK(bool(memfd) && ::ftruncate(memfd.get(), kSize) == 0);
    auto* own = static_cast<std::byte*>(
        ::mmap(nullptr, 2 * kSize, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    auto* shared = static_cast<std::byte*>(
        ::mmap(own + kSize, kSize, kReadWrite, MAP_SHARED | MAP_FIXED, memfd.get(), 0));
    CHECK(shared == own + kSize && ::madvise(own, kSize, MADV_NOHUGEPAGE) == 0);
    std::memset(own, 7, kChunk);
    std::memset(shared, 8, kChunk);
    ImageInfo info;
    info.pid = 1;
    info.regions = {
        {reinterpret_cast<std::uint64_t>(own), kSize, kReadWrite, RegionKind::private_anonymous},
        {reinterpret_cast<std::uint64_t>(shared), kSize, kReadWrite, RegionKind::shared_anonymous}};
    ProcessMemory self(::getpid());
    const sample::TempDir dir;
    write_image(dir.fd(), "gpu.img", info, self, {.threads = 1});
    info.kind = MemoryKind::cpu;
    write_image(dir.fd(), "cpu.img", info, self, {.threads = 1});
    const ImageReader image = ImageReader::open(dir.fd(), "cpu.img");

    CHECK(::madvise(own, kSize, MADV_DONTNEED) == 0);
    std::memset(shared, 9, kSize);
    refill(::getpid(), image, 1);
    unsigned char present[kChunk / kPage];
    CHECK(::mincore(own + kChunk, kChunk, present) == 0);
    for (const unsigned char page : present)
        CHECK(page == 0); // no page of zeros was made
    for (std::size_t i = 0; i < kSize; ++i) {
        CHECK(own[i] == std::byte(i < kChunk ? 7 : 0));
        CHECK(shared[i] == std::byte(i < kChunk ? 8 : 0)); // and nothing was there before
    }
    // Staging is never in a memfd; and private memory is no shared memory.
    CHECK_THROWS(Errc::corrupt_data, refill(::getpid(), ImageReader::open(dir.fd(), "gpu.img"), 1));
    CHECK(::mmap(shared, kSize, kReadWrite, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) ==
          shared);
    CHECK_THROWS(Errc::corrupt_data, refill(::getpid(), image, 1));
    CHECK(::munmap(own, 2 * kSize) == 0);
}

/// A file without a name on a tmpfs of `size`, of which the first MiB is data, mapped.
struct RemovedFile {
    static constexpr std::size_t kData = std::size_t{1} << 20;
    explicit RemovedFile(const std::string& size) {
        const std::string place = tmpfs.path("x");
        CHECK(::mkdir(place.c_str(), 0700) == 0 &&
              ::mount("tmpfs", place.c_str(), "tmpfs", 0, ("size=" + size).c_str()) == 0);
        fd = UniqueFd(::open((place + "/file").c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600));
        CHECK(bool(fd) && ::unlink((place + "/file").c_str()) == 0);
        CHECK(::ftruncate(fd.get(), 2 * kData) == 0);
        at = static_cast<std::byte*>(
            ::mmap(nullptr, 2 * kData, kReadWrite, MAP_SHARED, fd.get(), 0));
        std::memset(at, 8, kData);
        ImageInfo info;
        info.pid = 1;
        info.kind = MemoryKind::cpu;
        info.regions = {
            {reinterpret_cast<std::uint64_t>(at), kData, kReadWrite, RegionKind::shared_anonymous}};
        ProcessMemory self(::getpid());
        write_image(tmpfs.fd(), "x.img", info, self, {.threads = 1});
        CHECK(::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kData) == 0);
    }
    RemovedFile(const RemovedFile&) = delete;
    RemovedFile& operator=(const RemovedFile&) = delete;
    ~RemovedFile() { ::umount2(tmpfs.path("x").c_str(), MNT_DETACH); }
    void refill() { gpustasis::refill(::getpid(), ImageReader::open(tmpfs.fd(), "x.img"), 1); }
    struct stat status() const {
        struct stat found {};
        CHECK(::fstat(fd.get(), &found) == 0);
        return found;
    }
    sample::TempDir tmpfs{"/var/tmp"};
    UniqueFd fd;
    std::byte* at = nullptr;
};

void refill_changes_no_time_and_no_hole_of_a_file() {
    RemovedFile file("4m");
    const timespec times[2] = {{1000, 2000}, {3000, 4000}};
    CHECK(::futimens(file.fd.get(), times) == 0);
    file.refill();
    const struct stat status = file.status();
    CHECK(status.st_atim.tv_sec == 1000 && status.st_mtim.tv_sec == 3000 &&
          status.st_mtim.tv_nsec == 4000);
    CHECK(status.st_blocks * 512 == RemovedFile::kData);
    for (std::size_t i = 0; i < RemovedFile::kData; ++i)
        CHECK(file.at[i] == std::byte{8});
}

void a_full_tmpfs_is_named() {
    RemovedFile file("1m");
    CHECK(::fallocate(file.fd.get(), 0, RemovedFile::kData, RemovedFile::kData / 2) == 0);
    std::string why;
    try {
        file.refill();
    } catch (const Error& e) {
        CHECK(e.code() == Errc::io);
        why = e.what();
    }
    CHECK(why.find("; the tmpfs of ") != std::string::npos &&
          why.ends_with("/x/file (deleted) is full"));
}

/// In a mount namespace of its own: its mounts end with it.
void in_child(void (*run)()) {
    const pid_t child = fork_child();
    if (child == 0) {
        CHECK(::unshare(CLONE_NEWNS) == 0 &&
              ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
        run();
        ::_exit(0);
    }
    int status = 0;
    CHECK(::waitpid(child, &status, 0) == child && status == 0);
}

/// Memory of this process and its image: a part of data, as much of zeros, as much of data.
template <std::size_t part>
struct DroppedParts {
    explicit DroppedParts(std::uint64_t start_time = proc::start_time(::getpid()),
                          std::byte* place = nullptr)
        : started(start_time), place_(place) {}
    const std::uint64_t started;
    std::byte* const place_; ///< nullptr: anywhere
    static constexpr std::size_t kChunk = part;
    static constexpr std::size_t kSize = 3 * kChunk;
    static std::byte* map_at(std::byte* place) {
        const int flags =
            MAP_PRIVATE | MAP_ANONYMOUS | (place != nullptr ? MAP_FIXED_NOREPLACE : 0);
        void* const memory = ::mmap(place, kSize, kReadWrite, flags, -1, 0);
        CHECK(memory != MAP_FAILED);
        return static_cast<std::byte*>(memory);
    }
    std::byte* memory = map_at(place_);
    sample::TempDir dir;
    ImageReader image = write();

    ImageReader write() {
        std::memset(memory, 7, kChunk);
        std::memset(memory + 2 * kChunk, 8, kChunk);
        ImageInfo info;
        info.pid = 1;
        info.start_time = started;
        info.regions = {{reinterpret_cast<std::uint64_t>(memory), kSize, kReadWrite,
                         RegionKind::private_anonymous}};
        ProcessMemory self(::getpid());
        write_image(dir.fd(), "x.img", info, self, {.threads = 1});
        drop();
        return ImageReader::open(dir.fd(), "x.img");
    }
    void drop() { CHECK(::madvise(memory, kSize, MADV_DONTNEED) == 0); }
    void refill() { refill_dropped(::getpid(), image, 1); }
    bool is_intact() {
        for (std::size_t i = 0; i < kSize; ++i)
            if (memory[i] != std::byte(i < kChunk ? 7 : i < 2 * kChunk ? 0 : 8))
                return false;
        return true;
    }
    ~DroppedParts() { ::munmap(memory, kSize); }
};
using Dropped = DroppedParts<(std::size_t{256} << 10)>;
/// Who puts it back is told when 16 MiB are done.
using LargeDropped = DroppedParts<(std::size_t{8} << 20)>;

void pages_of_a_later_time_are_not_overwritten() {
    Dropped dropped;
    dropped.memory[5 * kPage] = std::byte{9};
    CHECK_THROWS(Errc::corrupt_data, dropped.refill());
    CHECK(dropped.memory[0] == std::byte{0});
    dropped.drop();
    dropped.refill();
    CHECK(dropped.is_intact());
    dropped.refill(); // all is there and as it should be
    CHECK(dropped.is_intact());
}

// Whose pid it had has ended, and this process has it now.
void memory_of_another_process_is_not_put_back() {
    Dropped dropped(1);
    CHECK_THROWS(Errc::gone, dropped.refill());
    CHECK(dropped.memory[0] == std::byte{0});
}

// Where neither the kernel nor a sanitizer puts anything.
std::byte* const kPlace = reinterpret_cast<std::byte*>(0x7e90'0000'0000);

/// A task with memory at kPlace, until it is told; from there on `then`.
[[noreturn]] void hold_memory(int ready, int told, void (*then)(int, int, const std::byte*)) {
    const std::byte* const memory = LargeDropped::map_at(kPlace);
    char byte = 0;
    CHECK(::write(ready, "r", 1) == 1 && ::read(told, &byte, 1) == 1);
    then(ready, told, memory);
    ::_exit(1);
}

/// The program that the task executes: whether anything has come to its memory.
void look_what_came(int, int, const std::byte* memory) {
    const auto is_empty = [](std::byte byte) { return byte == std::byte{0}; };
    ::_exit(std::all_of(memory, memory + LargeDropped::kSize, is_empty) ? 0 : 1);
}

void execute_it(int ready, int told, const std::byte*) {
    ::execl("/proc/self/exe", "test_refill", std::to_string(ready).c_str(),
            std::to_string(told).c_str(), nullptr);
}

// When half of its memory is put back. The other program has memory at the same place.
void a_program_that_the_task_executes_meanwhile_gets_nothing() {
    int ready[2], told[2];
    CHECK(::pipe(ready) == 0 && ::pipe(told) == 0);
    const pid_t task = fork_child();
    CHECK(task >= 0);
    if (task == 0) {
        ::close(ready[0]);
        ::close(told[1]);
        hold_memory(ready[1], told[0], execute_it);
    }
    ::close(ready[1]); // so that a child which has failed is not waited for
    ::close(told[0]);
    char byte = 0;
    CHECK(::read(ready[0], &byte, 1) == 1);
    const LargeDropped dropped(proc::start_time(task), kPlace);
    std::uint64_t done_before = 0;
    CHECK_THROWS(Errc::io, refill_dropped(task, dropped.image, 1, [&](std::uint64_t done) {
                     if (done_before == 0) {
                         CHECK(::write(told[1], "t", 1) == 1 && ::read(ready[0], &byte, 1) == 1);
                         done_before = done;
                     }
                 }));
    CHECK(done_before > 0 && done_before < LargeDropped::kSize);
    CHECK(::write(told[1], "t", 1) == 1);
    int status = 0;
    CHECK(::waitpid(task, &status, 0) == task && status == 0);
}

// Whoever puts pages back and is killed, or reads one that is missing, leaves empty pages.
void an_empty_page_is_unfilled_only_where_data_is_missing() {
    Dropped dropped;
    std::memset(dropped.memory, 7, Dropped::kChunk);
    std::memset(dropped.memory + 3 * kPage, 0, kPage);
    dropped.refill(); // the last chunk is missing
    CHECK(dropped.is_intact());
    std::memset(dropped.memory + 3 * kPage, 0, kPage);
    CHECK_THROWS(Errc::corrupt_data, dropped.refill());
    // The pages of the chunk of zeros are not there, and are none that are missing.
    CHECK(::madvise(dropped.memory + Dropped::kChunk, Dropped::kChunk, MADV_DONTNEED) == 0);
    CHECK_THROWS(Errc::corrupt_data, dropped.refill());
}

// A record of dropped memory that is damaged, or forged, may name any image.
void only_an_image_of_gpu_memory_is_of_what_a_dump_drops() {
    const pid_t self = ::getpid();
    const sample::TempDir dir;
    sample::Memory memory;
    memory.map(0x10000, sample::Buffer(kPage, std::byte{7}));
    ImageInfo info = sample::info_of(memory);
    info.start_time = proc::start_time(self);
    info.boot_id = proc::boot_id();
    for (const MemoryKind kind : {MemoryKind::gpu, MemoryKind::cpu}) {
        info.kind = kind;
        const Id digest = write_image(dir.fd(), "x.img", info, memory, {.threads = 1}).digest;
        Lineage lineage(dir.fd());
        const DroppedTask task{.pid = self,
                               .start_time = info.start_time,
                               .checkpoint_id = info.checkpoint_id,
                               .digest = digest,
                               .image = "x.img"};
        if (kind == MemoryKind::gpu)
            CHECK(open_dropped(task, lineage).digest() == digest);
        else
            CHECK_THROWS(Errc::corrupt_data, open_dropped(task, lineage));
    }
}

} // namespace

int main(int argc, char** argv) {
    if (argc == 3)
        hold_memory(std::atoi(argv[1]), std::atoi(argv[2]), look_what_came);
    refill_wants_the_mapping_that_was_there();
    refill_fills_shared_memory_too();
    in_child(refill_changes_no_time_and_no_hole_of_a_file);
    in_child(a_full_tmpfs_is_named);
    pages_of_a_later_time_are_not_overwritten();
    memory_of_another_process_is_not_put_back();
    a_program_that_the_task_executes_meanwhile_gets_nothing();
    an_empty_page_is_unfilled_only_where_data_is_missing();
    only_an_image_of_gpu_memory_is_of_what_a_dump_drops();
}
