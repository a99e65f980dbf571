// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/image_reader.hpp"
#include "core/image_writer.hpp"

#include <set>

using namespace gpustasis;
using sample::Memory;

namespace {

ImageReader write_and_open(const sample::TempDir& dir, const ImageInfo& info, Memory& memory,
                           const WriteOptions& options = {}) {
    const WriteResult result = write_image(dir.fd(), "gpustasis-1.img", info, memory, options);
    ImageReader reader = ImageReader::open(dir.fd(), "gpustasis-1.img");
    CHECK(reader.digest() == result.digest);
    CHECK(reader.file_size() == result.file_size);
    CHECK(reader.totals() == result.totals);
    return reader;
}

unsigned lent_puts = 0; ///< of memory that was lent

void what_was_written_is_read(std::uint32_t chunk_size, std::uint32_t alignment, bool compress) {
    const sample::TempDir dir;
    Memory memory;
    map_mixture(memory);
    const ImageInfo info = info_of(memory, chunk_size);
    const ImageReader reader =
        write_and_open(dir, info, memory, {.compress = compress, .alignment = alignment});
    CHECK(reader.info() == info);
    reader.verify(0);

    Memory restored;
    restored.map_like(memory, std::byte{0xaa});
    reader.restore(restored, 3, false);
    CHECK(restored == memory);

    sample::LendingMemory lending(chunk_size); // whole chunks; the last ones of regions are shorter
    lending.map_like(memory, std::byte{0xaa});
    reader.restore(lending, 3, false);
    CHECK(static_cast<Memory&>(lending) == memory);
    CHECK(lending.out() == 0);
    lent_puts += lending.puts;

    Memory fresh;
    fresh.map_like(memory, std::byte{0});
    reader.restore(fresh, 1, true);
    CHECK(fresh == memory);
}

// On the disk that this is built on, where direct I/O is usually to be had, and on tmpfs.
void the_way_of_io_leaves_no_trace(const char* place) {
    const sample::TempDir dir(place);
    Memory memory;
    map_mixture(memory);
    memory.map(0x7f2000000000, sample::random_bytes(70U << 20, 4)); // more than is reserved at once
    memory.map(0x7f3000000000, sample::pattern_bytes(1U << 20));
    std::vector<Id> digests;
    for (const IoMode io : {IoMode::automatic, IoMode::buffered, IoMode::direct}) {
        try {
            const WriteResult result =
                write_image(dir.fd(), "gpustasis-1.img", info_of(memory, 65536), memory,
                            {.threads = 4, .io = io});
            digests.push_back(result.digest);
            const UniqueFd fd(::openat(dir.fd(), "gpustasis-1.img", O_RDONLY | O_CLOEXEC));
            CHECK(::posix_fadvise(fd.get(), 0, 0, POSIX_FADV_DONTNEED) == 0);
            const ImageReader reader = ImageReader::open(dir.fd(), "gpustasis-1.img", io);
            CHECK(reader.file_size() == result.file_size);
            Memory restored;
            restored.map_like(memory, std::byte{0xaa});
            reader.restore(restored, 4, false);
            CHECK(restored == memory);
        } catch (const Error& e) {
            CHECK(io == IoMode::direct && e.code() == Errc::unsupported);
            CHECK(!dir.has(".gpustasis-1.img.part"));
        }
    }
    CHECK(digests.size() >= 2);
    for (const Id& digest : digests)
        CHECK(digest == digests[0]);
}

void every_chunk_can_be_read_alone() {
    const sample::TempDir dir;
    Memory memory;
    map_mixture(memory);
    const ImageReader reader = write_and_open(dir, info_of(memory, 8192), memory);
    std::set<Encoding> seen;
    std::uint64_t plain_size = 0;
    for (std::uint64_t i = reader.chunk_count(); i-- > 0;) {
        const ChunkInfo chunk = reader.chunk(i);
        sample::Buffer expected(chunk.plain_size);
        memory.read(chunk.address, expected);
        sample::Buffer plain(chunk.plain_size);
        reader.read_chunk(i, plain);
        CHECK(plain == expected);
        seen.insert(chunk.encoding);
        plain_size += chunk.plain_size;
    }
    CHECK((seen == std::set{Encoding::zero, Encoding::lz4, Encoding::raw}));
    CHECK(plain_size == 28672 + 4096 + 8192);
    CHECK_THROWS(Errc::bad_argument, reader.chunk(reader.chunk_count()));
    sample::Buffer small(1);
    CHECK_THROWS(Errc::bad_argument, reader.read_chunk(0, small));
}

void fresh_memory_is_not_touched_for_zero_chunks() {
    class NoZeros : public Memory {
    public:
        void write_zeros(std::uint64_t, std::uint64_t) override {
            CHECK(false && "zeros were written");
        }
    };
    const sample::TempDir dir;
    Memory memory;
    map_mixture(memory);
    const ImageReader reader = write_and_open(dir, info_of(memory), memory);
    NoZeros sink;
    sink.map_like(memory, std::byte{0});
    reader.restore(sink, 2, true);
    CHECK(static_cast<Memory&>(sink) == memory);
}

void a_task_without_memory_has_an_image() {
    const sample::TempDir dir;
    Memory memory;
    ImageInfo info = info_of(memory);
    info.gpus.clear();
    const ImageReader reader = write_and_open(dir, info, memory);
    CHECK(reader.chunk_count() == 0);
    CHECK(reader.info() == info);
    reader.verify(0);
    reader.restore(memory, 0, false);
}

void chunk_size_zero_means_the_default() {
    const sample::TempDir dir;
    Memory memory;
    memory.map(4096, sample::random_bytes(3 * kDefaultChunkSize / 2, 3));
    const ImageReader reader = write_and_open(dir, info_of(memory, 0), memory);
    CHECK(reader.info().chunk_size == kDefaultChunkSize);
    CHECK(reader.chunk_count() == 2);
}

void progress_ends_at_the_whole() {
    const sample::TempDir dir;
    Memory memory;
    const std::uint64_t size = 70U << 20;
    memory.map(4096, sample::Buffer(size));
    const ImageReader reader = write_and_open(dir, info_of(memory, 65536), memory);
    std::vector<std::uint64_t> told;
    reader.verify(2, [&](std::uint64_t done) { told.push_back(done); });
    CHECK(told.size() >= 3);
    CHECK(std::ranges::is_sorted(told));
    CHECK(told.back() == size);
}

} // namespace

int main() {
    for (const std::uint32_t chunk_size : {4096U, 8192U, 16384U, kMaxChunkSize})
        for (const std::uint32_t alignment : {1U, 64U, 4096U})
            for (const bool compress : {true, false})
                what_was_written_is_read(chunk_size, alignment, compress);
    CHECK(lent_puts > 0);
    the_way_of_io_leaves_no_trace(".");
    the_way_of_io_leaves_no_trace("/dev/shm");
    every_chunk_can_be_read_alone();
    fresh_memory_is_not_touched_for_zero_chunks();
    a_task_without_memory_has_an_image();
    chunk_size_zero_means_the_default();
    progress_ends_at_the_whole();
}
