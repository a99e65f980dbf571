#include "check.hpp"

#include "core/image_writer.hpp"
#include "core/process_memory.hpp"
#include "cuda_plugin/staging.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

using namespace gpustasis;

namespace {

std::vector<Region> diff(const char* before, const char* after) {
    return find_staging(parse_maps(before), parse_maps(after));
}

constexpr std::uint32_t kReadWrite = PROT_READ | PROT_WRITE;

void a_new_mapping_is_staging() {
    const auto regions =
        diff("1000-2000 rw-p 0 00:00 0\n", "1000-2000 rw-p 0 00:00 0\n8000-a000 rw-p 0 00:00 0\n");
    CHECK((regions ==
           std::vector<Region>{{0x8000, 0x2000, kReadWrite, RegionKind::private_anonymous}}));
}

// The kernel merges a new mapping with its neighbour: only what is new counts.
void a_grown_mapping_is_staging_where_it_grew() {
    const auto regions = diff("4000-5000 rw-p 0 00:00 0\n", "1000-9000 rw-p 0 00:00 0\n");
    CHECK((regions ==
           std::vector<Region>{{0x1000, 0x3000, kReadWrite, RegionKind::private_anonymous},
                               {0x5000, 0x4000, kReadWrite, RegionKind::private_anonymous}}));
}

void a_reservation_or_device_that_became_memory_is_staging() {
    const auto regions = diff("1000-3000 ---p 0 00:00 0\n5000-6000 rw-s 0 00:05 7 /dev/nvidia0\n",
                              "1000-2000 ---p 0 00:00 0\n2000-3000 rw-p 0 00:00 0\n"
                              "5000-6000 rw-p 0 00:00 0\n");
    CHECK(regions.size() == 2);
    CHECK(regions[0].address == 0x2000 && regions[1].address == 0x5000);
}

void what_is_not_memory_is_not_staging() {
    CHECK(diff("", "1000-2000 ---p 0 00:00 0\n2000-3000 r--p 0 08:01 9 /lib/x.so\n"
                   "3000-4000 rw-s 0 08:01 9 /dev/shm/x\n4000-5000 r-xp 0 00:00 0 [vdso]\n"
                   "5000-6000 -w-s 0 00:05 7 /dev/nvidia0\n")
              .empty());
}

void nothing_new_is_nothing() {
    const char* maps = "1000-2000 rw-p 0 00:00 0\n3000-4000 rw-s 0 00:01 9 /dev/zero (deleted)\n";
    CHECK(diff(maps, maps).empty());
}

void shared_memory_is_told_apart() {
    // The same address, another file: new memory although something alike was there.
    const auto regions = diff("1000-2000 rw-s 0 00:01 8 /dev/zero (deleted)\n",
                              "1000-2000 rw-s 0 00:01 9 /dev/zero (deleted)\n"
                              "2000-3000 rw-s 0 00:01 10 /dev/zero (deleted)\n");
    CHECK(regions.size() == 2);
    CHECK(regions[0].kind == RegionKind::shared_anonymous && regions[0].length == 0x1000);
}

void regions_split_by_protection_and_join_without() {
    const auto regions = diff("", "1000-2000 rw-p 0 00:00 0\n2000-3000 rw-p 0 00:00 0 [anon:a]\n"
                                  "3000-4000 r--p 0 00:00 0\n");
    CHECK(regions.size() == 2);
    CHECK(regions[0].length == 0x2000 && regions[1].protection == PROT_READ);
}

/// A directory for one image, gone with its owner.
struct ScratchDir {
    char path[32] = "/tmp/gpustasis-test-XXXXXX";
    int fd = -1;
    ScratchDir() {
        CHECK(::mkdtemp(path) != nullptr);
        fd = ::open(path, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
        CHECK(fd >= 0);
    }
    ~ScratchDir() {
        ::unlinkat(fd, "x.img", 0);
        ::close(fd);
        ::rmdir(path);
    }
};

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
    const ScratchDir dir;
    write_image(dir.fd, "x.img", info, self, {.threads = 2});
    const ImageReader image = ImageReader::open(dir.fd, "x.img");

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

} // namespace

int main() {
    a_new_mapping_is_staging();
    a_grown_mapping_is_staging_where_it_grew();
    a_reservation_or_device_that_became_memory_is_staging();
    what_is_not_memory_is_not_staging();
    nothing_new_is_nothing();
    shared_memory_is_told_apart();
    regions_split_by_protection_and_join_without();
    refill_wants_the_mapping_that_was_there();
}
