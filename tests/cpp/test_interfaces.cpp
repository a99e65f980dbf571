// SPDX-License-Identifier: Apache-2.0
// One suite for every implementation of an interface of core: what is written against the interface
// may rely on it, whichever there is.
#include "check.hpp"
#include "child.hpp"
#include "sample.hpp"

#include "core/chunk_io.hpp"
#include "core/image_format.hpp"
#include "core/image_output.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"
#include "core/process_memory.hpp"

#include <sys/mman.h>

#include <cstdio>
#include <cstring>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

using namespace gpustasis;
using sample::Buffer;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSize = 64 * kPage;
constexpr std::uint64_t kNowhere = kPage; // no memory of anybody's is there

/// Memory of kSize bytes that `content` was put into, and a port to it.
struct OwnProcess {
    explicit OwnProcess(const Buffer& content)
        : bytes(static_cast<std::byte*>(
              ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {
        CHECK(bytes != MAP_FAILED);
        std::ranges::copy(content, bytes);
    }
    OwnProcess(const OwnProcess&) = delete;
    OwnProcess& operator=(const OwnProcess&) = delete;
    ~OwnProcess() { ::munmap(bytes, kSize); }
    std::uint64_t address() const { return reinterpret_cast<std::uint64_t>(bytes); }

    std::byte* bytes;
    ProcessMemory port{::getpid()};
};

struct OtherProcess {
    explicit OtherProcess(const Buffer& content) : there(content) {
        std::memset(there.bytes, 0xee, kSize); // ours is another's from now on
    }
    std::uint64_t address() const { return there.address(); }

    OwnProcess there;
    Child child; // made once `there` is filled
    ProcessMemory port{child.pid()};
};

/// What other tests write images of in place of a task.
struct SampleMemory {
    explicit SampleMemory(Buffer content) { port.map(address(), std::move(content)); }
    static std::uint64_t address() { return 0x7f0000000000; }

    sample::Memory port;
};

template <class Implementation>
void memory_can_be_read_anywhere_in_it() {
    const Buffer content = sample::random_bytes(kSize, 3);
    Implementation memory(content);
    MemorySource& source = memory.port;
    for (const std::size_t offset : {std::size_t{0}, std::size_t{1}, kPage - 1, kSize - 1})
        for (const std::size_t size : {std::size_t{0}, std::size_t{1}, kPage, kSize - offset}) {
            if (offset + size > kSize)
                continue;
            Buffer found(size, std::byte{0x55});
            source.read(memory.address() + offset, found);
            CHECK(std::ranges::equal(found, Bytes(content).subspan(offset, size)));
        }
}

template <class Implementation>
void what_is_not_there_is_an_error() {
    Implementation memory(sample::random_bytes(kSize, 3));
    Buffer buffer(2 * kPage);
    CHECK_THROWS(Errc::io, memory.port.read(kNowhere, buffer));
    CHECK_THROWS(Errc::io, memory.port.write(kNowhere, buffer));
    CHECK_THROWS(Errc::io, memory.port.write_zeros(kNowhere, buffer.size()));
}

template <class Implementation>
void what_is_written_is_there_and_nothing_else_changes() {
    Buffer wanted = sample::random_bytes(kSize, 3);
    Implementation memory(wanted);
    MemorySink& sink = memory.port;
    for (const std::size_t offset : {std::size_t{0}, std::size_t{777}, 9 * kPage, kSize - 100}) {
        const Buffer part = sample::random_bytes(100, offset);
        sink.write(memory.address() + offset, part);
        std::ranges::copy(part, wanted.begin() + static_cast<std::ptrdiff_t>(offset));
    }
    sink.write_zeros(memory.address() + 20 * kPage + 5, 3 * kPage);
    std::fill_n(wanted.begin() + 20 * kPage + 5, 3 * kPage, std::byte{0});
    sink.write(memory.address() + 40 * kPage, {});
    sink.write_zeros(memory.address() + 40 * kPage, 0);
    Buffer found(kSize);
    memory.port.read(memory.address(), found);
    CHECK(found == wanted);
}

template <class Implementation>
void several_threads_use_it_at_once() {
    const Buffer content = sample::random_bytes(kSize, 3);
    const Buffer other = sample::random_bytes(kSize, 4);
    Implementation memory(content);
    constexpr std::size_t kThreads = 4;
    constexpr std::size_t kPart = kSize / kThreads;
    std::vector<std::jthread> threads;
    std::array<bool, kThreads> right{};
    for (std::size_t number = 0; number < kThreads; ++number)
        threads.emplace_back([&, number] {
            const std::size_t begin = number * kPart;
            Buffer found(kPart);
            bool all = true;
            for (std::size_t at = 0; at < kPart; at += kPage) {
                memory.port.read(memory.address() + begin + at, MutBytes(found).subspan(at, kPage));
                memory.port.write(memory.address() + begin + at,
                                  Bytes(other).subspan(begin + at, kPage));
            }
            all = std::ranges::equal(found, Bytes(content).subspan(begin, kPart));
            right[number] = all;
        });
    threads.clear();
    CHECK(std::ranges::all_of(right, [](bool one) { return one; }));
    Buffer found(kSize);
    memory.port.read(memory.address(), found);
    CHECK(found == other);
}

template <class Implementation>
void an_image_of_it_is_exact() {
    Buffer content = sample::random_bytes(kSize / 2, 3);
    content.resize(kSize); // zeros behind
    Implementation memory(content);
    const sample::TempDir dir;
    ImageInfo info = sample::info_of({}, kPage);
    info.regions = {{.address = memory.address(), .length = kSize, .protection = 3}};
    write_image(dir.fd(), "x.img", info, memory.port, {.threads = 2});
    memory.port.write(memory.address(), sample::random_bytes(kSize, 9));
    ImageReader::open(dir.fd(), "x.img").restore(memory.port, 2, false);
    Buffer found(kSize);
    memory.port.read(memory.address(), found);
    CHECK(found == content);
}

template <class Implementation>
void memory_port() {
    memory_can_be_read_anywhere_in_it<Implementation>();
    what_is_not_there_is_an_error<Implementation>();
    what_is_written_is_there_and_nothing_else_changes<Implementation>();
    several_threads_use_it_at_once<Implementation>();
    an_image_of_it_is_exact<Implementation>();
}

/// A way to write and read chunks, on one file system.
struct Way {
    const char* place;
    IoMode mode;
};

int direct_ways = 0; ///< those that went past the page cache because they had to

std::unique_ptr<ChunkOutput> open_output(int fd, const Way& way) {
    try {
        return std::make_unique<ChunkOutput>(fd, way.mode, kPage);
    } catch (const Error& e) {
        CHECK(way.mode == IoMode::direct && e.code() == Errc::unsupported);
        return nullptr;
    }
}

// Aligned buffers, as the writer has them, and others, as it has for what it could not compress.
template <class MakeBuffer>
void chunks_come_back(const Way& way, const MakeBuffer& make_buffer) {
    constexpr std::size_t kChunks = 40;
    constexpr std::uint64_t kStep = 4 * kPage;
    const sample::TempDir dir(way.place);
    const UniqueFd fd(::openat(dir.fd(), "chunks", O_RDWR | O_CREAT | O_CLOEXEC, 0600));
    CHECK(fd);
    const std::unique_ptr<ChunkOutput> output = open_output(fd.get(), way);
    if (output == nullptr)
        return;
    CHECK(way.mode != IoMode::buffered || !output->is_direct());
    CHECK(way.mode != IoMode::direct || output->is_direct());
    const auto size_of = [](std::size_t chunk) { return 1 + chunk * 401 % (4 * kPage); };
    {
        std::vector<std::jthread> threads;
        for (std::size_t first = 0; first < 4; ++first) // from the end on, by four threads
            threads.emplace_back([&, first] {
                for (std::size_t chunk = kChunks - 1 - first; chunk < kChunks; chunk -= 4) {
                    auto buffer = make_buffer(4 * kPage);
                    const MutBytes bytes = buffer.bytes();
                    std::ranges::copy(sample::random_bytes(size_of(chunk), chunk), bytes.begin());
                    output->write(chunk * kStep, bytes, size_of(chunk));
                }
            });
    }
    const std::uint64_t end = (kChunks - 1) * kStep + size_of(kChunks - 1);
    output->finish(end);
    CHECK(::lseek(fd.get(), 0, SEEK_END) == static_cast<off_t>(end));

    const auto file =
        std::make_shared<const UniqueFd>(::openat(dir.fd(), "chunks", O_RDONLY | O_CLOEXEC));
    const ChunkInput input(file, 0, end, way.mode);
    CHECK(way.mode != IoMode::buffered || !input.is_direct());
    CHECK(way.mode != IoMode::direct || input.is_direct());
    direct_ways += way.mode == IoMode::direct ? 1 : 0;
    for (std::size_t chunk = 0; chunk < kChunks; ++chunk) {
        AlignedBuffer buffer(4 * kPage);
        const Bytes found = input.read(chunk * kStep, size_of(chunk), buffer.bytes());
        CHECK(std::ranges::equal(found, sample::random_bytes(size_of(chunk), chunk)));
    }
    AlignedBuffer buffer(4 * kPage);
    CHECK_THROWS(Errc::corrupt_data, input.read(end - 1, 2, buffer.bytes()));
}

struct PlainBuffer {
    explicit PlainBuffer(std::size_t size) : whole(size + 1) {}
    MutBytes bytes() { return MutBytes(whole).subspan(1); } // aligned to nothing
    Buffer whole;
};

void chunk_io(const Way& way) {
    chunks_come_back(way, [](std::size_t size) { return AlignedBuffer(size); });
    chunks_come_back(way, [](std::size_t size) { return PlainBuffer(size); });
}

/// What a writer puts into it is what a reader gets, and nobody needs a file.
class MemoryImage final : public ImageOutput, public ImageInput {
public:
    MemoryImage(Buffer& bytes, std::uint32_t alignment) : bytes_(bytes), alignment_(alignment) {}

    void write(std::uint64_t offset, MutBytes buffer, std::size_t size) override {
        take(offset, buffer.first(size), format::align_up(size, alignment_));
    }
    void put(std::uint64_t offset, Bytes bytes) override { take(offset, bytes, bytes.size()); }
    void commit(std::uint64_t size) override { bytes_.resize(size); }
    std::uint64_t size() const noexcept override { return bytes_.size(); }
    Bytes read(std::uint64_t offset, std::size_t size, MutBytes buffer) const override {
        std::ranges::copy(Bytes(bytes_).subspan(offset, size), buffer.begin());
        return buffer.first(size);
    }
    bool is_direct() const noexcept override { return false; }

private:
    void take(std::uint64_t offset, Bytes bytes, std::uint64_t size) {
        const std::lock_guard lock(mutex_);
        const std::uint64_t end = offset + size;
        const auto after = taken_.lower_bound(offset);
        CHECK(after == taken_.end() || after->first >= end); // each byte once at most
        CHECK(after == taken_.begin() || std::prev(after)->second <= offset);
        taken_[offset] = end;
        bytes_.resize(std::max<std::size_t>(bytes_.size(), end));
        std::ranges::copy(bytes, bytes_.begin() + static_cast<std::ptrdiff_t>(offset));
    }

    Buffer& bytes_;
    std::uint32_t alignment_;
    std::mutex mutex_;
    std::map<std::uint64_t, std::uint64_t> taken_; ///< begin and end of what was put
};

// The same bytes as in a file, for any number of threads.
void images_need_no_file() {
    sample::Memory memory;
    sample::map_mixture(memory);
    for (unsigned seed = 0; seed < 40; ++seed)
        memory.map(0x7f2000000000 + seed * 0x10000, sample::random_bytes(4096, seed));
    const ImageInfo info = sample::info_of(memory, 8192);
    for (const std::uint32_t alignment : {1U, 64U, 4096U})
        for (const unsigned threads : {1U, 4U}) {
            const WriteOptions options{.threads = threads, .alignment = alignment};
            const sample::TempDir dir;
            const WriteResult plain = write_image(dir.fd(), "x.img", info, memory, options);
            Buffer bytes;
            MemoryImage output(bytes, alignment);
            CHECK(write_image(output, info, memory, options).digest == plain.digest);
            CHECK(bytes == sample::read_file(dir.fd(), "x.img"));

            const ImageReader image =
                ImageReader::from_input(std::make_shared<MemoryImage>(bytes, alignment), "x.img");
            CHECK(image.digest() == plain.digest && image.file_size() == bytes.size());
            sample::Memory restored;
            restored.map_like(memory, std::byte{0x5a});
            image.restore(restored, threads, false);
            CHECK(restored == memory);
        }
}

} // namespace

int main(int, char** argv) {
    memory_port<OwnProcess>();
    memory_port<OtherProcess>();
    memory_port<SampleMemory>();
    images_need_no_file();
    const std::string built(argv[0]); // on the disk that this is built on
    const std::string disk = built.substr(0, built.rfind('/'));
    for (const char* place : {disk.c_str(), "/dev/shm"})
        for (const IoMode mode : {IoMode::automatic, IoMode::buffered, IoMode::direct})
            chunk_io({place, mode});
    if (direct_ways == 0)
        std::fprintf(stderr, "no direct I/O in %s\n", disk.c_str());
    CHECK(direct_ways > 0); // at least the disk can
}
