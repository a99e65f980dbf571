// SPDX-License-Identifier: Apache-2.0
// What a dump into memory writes: into fresh pages, and into those of the pool; and how much it may take.
#include "check.hpp"
#include "sample.hpp"

#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/lineage.hpp"
#include "cuda_plugin/arena_dump.hpp"
#include "cuda_plugin/memory_directory.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

using namespace gpustasis;
using sample::Memory;

namespace {

constexpr std::uint32_t kChunk = 4096;
constexpr std::uint64_t kBase = 0x10000;
constexpr std::uint64_t kMib = 1U << 20;

/// An arena of its own, and an image directory.
struct Place {
    sample::TempDir images;
    sample::TempDir memory{"/dev/shm"};
    ArenaConfig config;

    Place() { config.path = directory_path(memory.fd()) + "/a/b"; }
    std::string path(const std::string& name) const { return config.path + "/" + name; }
};

ImageInfo info_of(const ArenaDump& dump, Memory& memory) {
    ImageInfo info;
    info.checkpoint_id = dump.id();
    info.pid = 7;
    info.chunk_size = kChunk;
    info.regions = memory.regions();
    return info;
}

WriteResult write(ArenaDump& dump, Memory& memory, const std::string& name = "x.img") {
    return dump.write(name, info_of(dump, memory), memory,
                      {.compress = false, .io = IoMode::buffered});
}

Memory noise(std::size_t chunks, std::uint64_t seed) {
    Memory memory;
    memory.map(kBase, sample::random_bytes(chunks * kChunk, seed));
    return memory;
}

void put_in_pool(const Place& place, const std::string& name, std::size_t size) {
    ::mkdir(place.path(kArenaPool).c_str(), 0700);
    std::ofstream(place.path(kArenaPool) + "/" + name) << std::string(size, 'x');
}

void an_arena_is_made_in_memory_alone() {
    const Place place;
    CHECK(open_arena(place.config.path));
    struct stat status {};
    CHECK(::stat(place.config.path.c_str(), &status) == 0 && (status.st_mode & 07777U) == 0700);
    const sample::TempDir disk("/var/tmp");
    CHECK_THROWS(Errc::bad_argument, open_arena(disk.path("x/y")));
    CHECK_THROWS(Errc::bad_argument, open_arena(directory_path(disk.fd())));
    CHECK(!disk.has("x"));
}

// Old bytes in an image would make it damaged: the reader looks at each, padding included.
void pages_of_the_pool_are_written_into() {
    for (const std::size_t old : {100UL, 40UL * kChunk, 4UL * kMib}) {
        const Place place;
        ArenaDump dump(place.config, place.images.fd());
        put_in_pool(place, "0", old);
        put_in_pool(place, "1", 3); // the largest is taken
        Memory memory = noise(33, old);
        const WriteResult written = write(dump, memory);
        const ImageReader image = ImageReader::open(dump.directory(), "x.img");
        image.verify(1);
        CHECK(image.digest() == written.digest && image.file_size() == written.file_size);
        CHECK(::access((place.path(kArenaPool) + "/0").c_str(), F_OK) != 0);
        CHECK(::access((place.path(kArenaPool) + "/1").c_str(), F_OK) == 0);
        struct stat status {};
        CHECK(::fstatat(dump.directory(), "x.img", &status, 0) == 0);
        CHECK(static_cast<std::uint64_t>(status.st_size) == written.file_size);
    }
}

std::vector<std::uint64_t> sizes_in_pool(const Place& place) {
    std::vector<std::uint64_t> sizes;
    for (const auto& file : std::filesystem::directory_iterator(place.path(kArenaPool)))
        sizes.push_back(file.file_size());
    std::ranges::sort(sizes);
    return sizes;
}

// An incremental dump is to leave the large file to the next one, which is to find its pages there.
void a_large_file_goes_back_to_the_pool() {
    constexpr std::uint64_t kLarge = 32 * kMib;
    struct Case {
        std::size_t chunks;
        std::uint64_t limit; // MiB
        bool returned;
        std::uint64_t most = 0; // MiB, that the dump reserves
        std::uint64_t pool = 0; // MiB
    };
    for (const Case& one : {Case{33, 80, true}, Case{1024, 80, true}, Case{1024, 80, true, 40},
                            Case{2100, 64, false}, Case{1024, 35, false, 0, 35}, // no room for both
                            Case{1024, 80, false, 0, 20}}) { // and not so much in the pool
        Place place;
        place.config.limit = one.limit * kMib;
        place.config.pool = one.pool * kMib;
        ArenaDump dump(place.config, place.images.fd());
        put_in_pool(place, "0", kLarge);
        put_in_pool(place, "1", 5); // stays
        struct stat before {
        }, after{};
        CHECK(::stat((place.path(kArenaPool) + "/0").c_str(), &before) == 0);
        Memory memory = noise(one.chunks, 11);
        std::int64_t added = 0;
        dump.write("x.img", kChunk, one.most * kMib, added, [&](ImageOutput& output) {
            return write_image(output, info_of(dump, memory), memory, {.compress = false});
        });
        const ImageReader image = ImageReader::open(dump.directory(), "x.img");
        image.verify(1);
        write_image(place.images.fd(), "x.img", info_of(dump, memory), memory, {.compress = false});
        CHECK(sample::read_file(dump.directory(), "x.img") ==
              sample::read_file(place.images.fd(), "x.img"));
        CHECK(::fstatat(dump.directory(), "x.img", &after, 0) == 0);
        CHECK((before.st_ino == after.st_ino) == !one.returned);
        CHECK(sizes_in_pool(place) == (one.returned ? std::vector<std::uint64_t>{5, kLarge}
                                                    : std::vector<std::uint64_t>{5}));
        const auto size = static_cast<std::int64_t>(image.file_size());
        CHECK(added == (one.returned ? size : size - static_cast<std::int64_t>(kLarge)));
        CHECK(::faccessat(dump.directory(), ".x.img.part", F_OK, 0) != 0);
        CHECK(::faccessat(dump.directory(), "..x.img.part.part", F_OK, 0) != 0);
        Memory next = noise(512, 12); // the next one takes it
        write(dump, next, "y.img");
        ImageReader::open(dump.directory(), "y.img").verify(1);
    }
}

void the_bytes_are_those_of_a_file_on_a_disk() {
    const Place place;
    ArenaDump dump(place.config, place.images.fd());
    put_in_pool(place, "0", kMib);
    Memory memory = noise(9, 5);
    memory.map(0x900000, sample::Buffer(3 * kChunk)); // zeros
    write(dump, memory);
    write_image(place.images.fd(), "x.img", info_of(dump, memory), memory, {.compress = false});
    CHECK(sample::read_file(dump.directory(), "x.img") ==
          sample::read_file(place.images.fd(), "x.img"));
}

void a_limit_is_kept() {
    Place place;
    place.config.limit = kMib;
    ArenaDump dump(place.config, place.images.fd());
    Memory small = noise(64, 1);
    write(dump, small);
    Memory large = noise(512, 2);
    CHECK_THROWS(Errc::io, write(dump, large, "y.img"));
    CHECK(::faccessat(dump.directory(), ".y.img.part", F_OK, 0) != 0);
    CHECK(::faccessat(dump.directory(), "y.img", F_OK, 0) != 0);
}

// What the pool has is given up for what cannot be written into it.
void the_pool_makes_room() {
    Place place;
    place.config.limit = kMib;
    ArenaDump dump(place.config, place.images.fd());
    for (const char* name : {"0", "1", "2", "3"})
        put_in_pool(place, name, kMib / 4);
    Memory memory = noise(200, 3);
    write(dump, memory);
    ImageReader::open(dump.directory(), "x.img").verify(1);
    const ArenaUsage usage = usage_of(open_arena(place.config.path).get());
    CHECK(usage.kept >= 200 * kChunk);
    CHECK(usage.pool == 0);
    std::size_t left = 0;
    for (const char* name : {"0", "1", "2", "3"})
        left += ::access((place.path(kArenaPool) + "/" + name).c_str(), F_OK) == 0 ? 1 : 0;
    CHECK(left < 2);
}

void room_is_reserved() {
    Place place;
    place.config.limit = 10 * kMib;
    ArenaDump first(place.config, place.images.fd());
    const sample::TempDir elsewhere;
    ArenaDump second(place.config, elsewhere.fd());
    first.room().reserve({.stored = 6 * kMib}, false);
    CHECK_THROWS(Errc::unsupported, second.room().reserve({.stored = 5 * kMib}, false));
    second.room().reserve({.stored = 4 * kMib}, false);
    first.complete();
    second.room().reserve({.stored = 9 * kMib}, false);
    // One that waits has its time.
    place.config.waits = true;
    place.config.wait_s = 1;
    const sample::TempDir third;
    ArenaDump late(place.config, third.fd());
    CHECK_THROWS(Errc::unsupported, late.room().reserve({.stored = 2 * kMib}, true));
    second.remove();
    late.room().reserve({.stored = 2 * kMib}, true);
}

// What the dump writes would be hidden, and lost when the dump ends its task.
void one_over_which_an_arena_was_mounted_gets_no_room() {
    const Place place;
    ArenaDump hidden(place.config, place.images.fd());
    const sample::TempDir elsewhere;
    ArenaDump beside(place.config, elsewhere.fd());
    beside.room().reserve({.stored = kMib}, false);
    CHECK(::mount("tmpfs", place.config.path.c_str(), "tmpfs", 0, "mode=0700") == 0);
    CHECK_THROWS(Errc::io, hidden.room().reserve({.stored = kMib}, false));
    CHECK(::mkdir(place.path(id_text(hidden.id())).c_str(), 0700) == 0); // nor is it another one
    CHECK_THROWS(Errc::io, hidden.room().reserve({.stored = kMib}, true));
    CHECK(::umount2(place.config.path.c_str(), MNT_DETACH) == 0);
    hidden.room().reserve({.stored = kMib}, false);
}

// In its tmpfs others need some room, and other dumps were promised some.
void its_file_system_has_a_limit_of_its_own() {
    const sample::TempDir like;
    const UniqueFd arena = make_memory_directory(like.fd(), 4 * kMib);
    ArenaConfig config;
    config.limit = 1024 * kMib;
    const auto room = [&](const ArenaUsage& usage) {
        return room_for(arena.get(), config, usage, {});
    };
    CHECK(room({}) == 4 * kMib - kMib / 4);
    CHECK(room({.kept = 512 * kMib}) == 4 * kMib - kMib / 4); // which are somewhere else then
    CHECK(room({.pool = kMib}) == 5 * kMib - kMib / 4);
    CHECK(room({.promised = kMib}) == 3 * kMib - kMib / 4);
    CHECK(room({.promised = 4 * kMib}) == 0);
    config.limit = 3 * kMib;
    CHECK(room({.kept = kMib}) == 2 * kMib);
}

// The pool's files are nobody's until they are taken: two dumps may not both count on all of them.
void the_pool_is_promised_once() {
    Place place;
    place.config.limit = 12 * kMib;
    ArenaDump first(place.config, place.images.fd());
    put_in_pool(place, "0", 8 * kMib);
    const sample::TempDir elsewhere;
    ArenaDump second(place.config, elsewhere.fd());
    first.room().reserve({.stored = 9 * kMib}, false);
    CHECK_THROWS(Errc::unsupported, second.room().reserve({.stored = 4 * kMib}, false));
    second.room().reserve({.stored = 3 * kMib}, false);
}

// A process that was forked writes into a file of the pool: that takes nothing of the room.
void what_another_process_has_written_is_counted_as_it_was() {
    Place place;
    place.config.limit = 4 * kMib;
    ArenaDump dump(place.config, place.images.fd());
    put_in_pool(place, "0", 3 * kMib);
    dump.room().reserve({.stored = 4 * kMib}, false);
    const auto write_one = [](ImageOutput& output) {
        const std::vector<std::byte> bytes(kMib);
        output.put(0, bytes);
        output.commit(kMib);
        return WriteResult{};
    };
    std::int64_t added = 1;
    dump.write("x.img", 1, kMib, added, write_one);
    CHECK(added == -2 * static_cast<std::int64_t>(kMib)); // what the file had more
    dump.write("y.img", 1, 3 * kMib, added, [&](ImageOutput& output) {
        const std::vector<std::byte> bytes(3 * kMib);
        output.put(0, bytes);
        output.commit(3 * kMib);
        return WriteResult{};
    });
    CHECK(added == 3 * static_cast<std::int64_t>(kMib));
    CHECK_THROWS(Errc::io, dump.write("z.img", 1, kMib, added, write_one));
    dump.room().spent(
        -static_cast<std::int64_t>(kMib)); // as a worker says that has given some to it
    dump.write("z.img", 1, kMib, added, write_one);
}

void a_marker_is_there_until_it_is_removed() {
    const Place place;
    {
        ArenaDump dump(place.config, place.images.fd());
        CHECK(!place.images.has(kArenaMarker));
        dump.mark();
        CHECK(directory_path(stored_directory(place.images.fd()).get()) ==
              directory_path(dump.directory()));
        CHECK_THROWS(Errc::unsupported, remove_marker(place.images.fd())); // the dump is at work
    }
    remove_marker(place.images.fd());
    remove_marker(place.images.fd()); // there is none
    CHECK(!place.images.has(kArenaMarker));

    ArenaDump failed(place.config, place.images.fd());
    failed.mark();
    Memory memory = noise(2, 4);
    write(failed, memory);
    const std::string directory = directory_path(failed.directory());
    failed.remove();
    CHECK(!place.images.has(kArenaMarker) && ::access(directory.c_str(), F_OK) != 0);
}

void what_it_cannot_do_is_refused_by_name() {
    Config config;
    config.arena.is_used = true;
    refuse_with_arena(config);
    const auto refused = [](const Config& with) {
        CHECK_THROWS(Errc::unsupported, refuse_with_arena(with));
    };
    Config with = config;
    with.layout = Layout::packed;
    refused(with);
    with = config;
    with.recipients = {"/me.pem"};
    refused(with);
    with = config;
    with.sign = "/key.pem";
    refused(with);
    with = config;
    with.incremental = true;
    refused(with);
    with = config;
    with.externalize = false;
    refused(with);
    with.cpu_memory = CpuMemory::ours;
    refuse_with_arena(with);
}

} // namespace

int main() {
    CHECK(::unshare(CLONE_NEWNS) == 0 && // what is mounted goes away with this program
          ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    an_arena_is_made_in_memory_alone();
    pages_of_the_pool_are_written_into();
    a_large_file_goes_back_to_the_pool();
    the_bytes_are_those_of_a_file_on_a_disk();
    a_limit_is_kept();
    the_pool_makes_room();
    room_is_reserved();
    one_over_which_an_arena_was_mounted_gets_no_room();
    its_file_system_has_a_limit_of_its_own();
    the_pool_is_promised_once();
    what_another_process_has_written_is_counted_as_it_was();
    a_marker_is_there_until_it_is_removed();
    what_it_cannot_do_is_refused_by_name();
    return 0;
}
