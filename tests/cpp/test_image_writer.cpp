// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/direct_io.hpp"
#include "core/image_reader.hpp"
#include "core/image_writer.hpp"

#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <csignal>
#include <map>
#include <mutex>
#include <thread>

using namespace gpustasis;
using sample::Buffer;
using sample::Memory;

namespace {

constexpr const char* kName = "gpustasis-1.img";

void map_large_mixture(Memory& memory) {
    std::uint64_t address = 0x7f0000000000;
    for (std::uint64_t i = 0; i < 40; ++i) {
        const std::size_t size = 4096 * (1 + i * 7 % 50);
        memory.map(address, i % 3 == 0   ? Buffer(size)
                            : i % 3 == 1 ? sample::pattern_bytes(size)
                                         : sample::random_bytes(size, i));
        address += size + 4096 * (i % 4);
    }
}

void the_file_does_not_depend_on_threads() {
    const sample::TempDir dir;
    Memory memory;
    map_large_mixture(memory);
    const ImageInfo info = info_of(memory, 16384);
    Buffer first;
    for (const unsigned threads : {1U, 2U, 3U, 8U, 32U}) {
        write_image(dir.fd(), kName, info, memory, {.threads = threads});
        const Buffer bytes = sample::read_file(dir.fd(), kName);
        if (first.empty())
            first = bytes;
        CHECK(bytes == first);
    }
}

/// Memory that delays or fails, and watches what the writer does to it.
class Watched : public Memory {
public:
    void read(std::uint64_t address, MutBytes out) override {
        const unsigned now = ++readers_;
        for (unsigned most = most_readers.load(); most < now;)
            if (most_readers.compare_exchange_weak(most, now))
                break;
        if (!has_waited.exchange(true))
            static_cast<void>(comes_true([this] { return most_readers >= awaited; }));
        std::this_thread::sleep_for(std::chrono::milliseconds(delay_ms));
        --readers_;
        if (++reads == fail_at)
            throw io_error("the test", EIO);
        Memory::read(address, out);
    }
    std::atomic<unsigned> most_readers = 0;
    std::atomic<unsigned> reads = 0;
    unsigned fail_at = 0; ///< 0: never
    unsigned delay_ms = 0;
    unsigned awaited = 0; ///< the first reader waits until so many at once have been there

private:
    std::atomic<unsigned> readers_ = 0;
    std::atomic<bool> has_waited = false;
};

void chunks_are_read_in_parallel() {
    const sample::TempDir dir;
    Watched memory;
    memory.map(4096, Buffer(64 * 4096));
    memory.delay_ms = 2;
    memory.awaited = 2;
    write_image(dir.fd(), kName, info_of(memory), memory, {.threads = 4});
    CHECK(memory.most_readers >= 2);
    CHECK(memory.most_readers <= 4);
}

/// More memory than the test may hold: compressible, and different at each address.
class Endless : public MemorySource {
public:
    void read(std::uint64_t address, MutBytes out) override {
        std::ranges::fill(out, static_cast<std::byte>(address / 4096 % 251));
    }
};

long peak_kib() {
    rusage usage{};
    CHECK(::getrusage(RUSAGE_SELF, &usage) == 0);
    return usage.ru_maxrss;
}

void memory_needed_does_not_grow_with_the_image() {
    const sample::TempDir dir;
    Endless source;
    ImageInfo info = info_of(Memory{}, kDefaultChunkSize);
    info.regions = {{.address = 4096, .length = 512U << 20, .protection = 3}};
    const long before = peak_kib();
    write_image(dir.fd(), kName, info, source, {.threads = 4});
    ImageReader::open(dir.fd(), kName).verify(4);
#if !defined(__SANITIZE_ADDRESS__) && !defined(__SANITIZE_THREAD__) // they keep what was freed
    CHECK(peak_kib() - before < 32 << 10);
#else
    CHECK(peak_kib() >= before);
#endif
}

/// Memory that lends what is within `window` bytes of the first that is out, and spoils what it has taken back.
class Lending : public Memory {
public:
    MutBytes lend(std::uint64_t address, std::size_t size) override {
        std::unique_lock lock(mutex_);
        freed_.wait(lock, [&] {
            return cancelled_ || out_.empty() || address < out_.begin()->first + window;
        });
        if (cancelled_)
            throw io_error("the test", ECANCELED);
        AlignedBuffer buffer(size);
        Memory::read(address, buffer.bytes().first(size));
        ++lent;
        return out_.emplace(address, std::move(buffer)).first->second.bytes().first(size);
    }
    void take_back(std::uint64_t address, MutBytes bytes) noexcept override {
        {
            const std::lock_guard lock(mutex_);
            CHECK(out_.at(address).bytes().data() == bytes.data());
            std::ranges::fill(bytes, std::byte{0xee});
            back_.push_back(std::move(out_.at(address))); // who still uses it reads what is spoilt
            out_.erase(address);
        }
        freed_.notify_all();
    }
    void cancel() noexcept override {
        {
            const std::lock_guard lock(mutex_);
            cancelled_ = true;
        }
        freed_.notify_all();
    }
    std::size_t out() const { return out_.size(); }
    std::uint64_t window = 16384;
    unsigned lent = 0;

private:
    std::mutex mutex_;
    std::condition_variable freed_;
    std::map<std::uint64_t, AlignedBuffer> out_;
    std::vector<AlignedBuffer> back_;
    bool cancelled_ = false;
};

void what_is_lent_makes_the_same_file() {
    const sample::TempDir dir;
    Memory plain;
    map_large_mixture(plain);
    for (const bool compress : {false, true})
        for (const std::uint32_t alignment : {1U, 4096U}) {
            const ImageInfo info = info_of(plain, 16384);
            WriteOptions options{
                .compress = compress, .alignment = alignment, .io = IoMode::buffered};
            write_image(dir.fd(), kName, info, plain, options);
            const Buffer wanted = sample::read_file(dir.fd(), kName);
            for (const unsigned threads : {1U, 4U, 8U}) {
                Lending memory;
                map_large_mixture(memory);
                options.threads = threads;
                write_image(dir.fd(), kName, info, memory, options);
                CHECK(sample::read_file(dir.fd(), kName) == wanted);
                CHECK(memory.lent > 40 && memory.out() == 0);
            }
        }
}

/// Takes some chunks, and has no room for more.
class FullOutput : public ImageOutput {
public:
    void write(std::uint64_t, MutBytes, std::size_t) override {
        if (++written > 5)
            throw io_error("write", ENOSPC);
    }
    void put(std::uint64_t, Bytes) override {}
    void commit(std::uint64_t) override { CHECK(false && "no image is whole"); }
    bool is_direct() const noexcept override { return false; }
    std::atomic<unsigned> written = 0;
};

void who_waits_for_what_is_lent_ends_with_a_failed_write() {
    for (int round = 0; round < 20; ++round) {
        Lending memory;
        memory.map(4096, sample::random_bytes(64 * 4096, 1));
        memory.window = 8192;
        FullOutput output;
        CHECK_THROWS(Errc::io, write_image(output, info_of(memory, 4096), memory,
                                           {.threads = 4, .alignment = 4096}));
        CHECK(memory.out() == 0);
    }
}

void a_failing_source_leaves_nothing_behind() {
    for (const unsigned threads : {1U, 4U})
        for (const unsigned fail_at : {1U, 5U, 64U}) {
            const sample::TempDir dir;
            Watched memory;
            memory.map(4096, sample::random_bytes(64 * 4096, 1));
            memory.fail_at = fail_at;
            CHECK_THROWS(Errc::io, write_image(dir.fd(), kName, info_of(memory), memory,
                                               {.threads = threads}));
            // Each other thread may be in one before the chunk that fails, and after it in one more.
            CHECK(memory.reads <= fail_at + 2 * (threads - 1));
            CHECK(dir.empty());
        }
}

// A limit on the file's size stands for a full disk: any user can have it.
void a_write_that_fails_leaves_nothing_behind() {
    for (const rlim_t limit : {0U, 100U, 8192U, 100000U, 260000U}) {
        const sample::TempDir dir;
        Memory memory;
        memory.map(4096, sample::random_bytes(64 * 4096, 1));
        const pid_t child = fork_child();
        if (child == 0) {
            const rlimit size{limit, limit};
            ::signal(SIGXFSZ, SIG_IGN);
            ::setrlimit(RLIMIT_FSIZE, &size);
            CHECK_THROWS(Errc::io,
                         write_image(dir.fd(), kName, info_of(memory), memory, {.threads = 3}));
            CHECK(!dir.has(kName));
            CHECK(!dir.has(".gpustasis-1.img.part"));
            ::_exit(0);
        }
        int status = 0;
        CHECK(::waitpid(child, &status, 0) == child && status == 0);
    }
}

void a_full_disk_leaves_nothing_behind() {
    const sample::TempDir dir;
    CHECK(::mkdirat(dir.fd(), "small", 0700) == 0);
    if (::mount("none", dir.path("small").c_str(), "tmpfs", 0, "size=256k") != 0) {
        CHECK(::geteuid() != 0 || errno == EPERM); // RLIMIT_FSIZE above stands in for it
        return;
    }
    Memory memory;
    memory.map(4096, sample::random_bytes(128 * 4096, 1));
    const int small = ::openat(dir.fd(), "small", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK_THROWS(Errc::io, write_image(small, kName, info_of(memory), memory, {.threads = 3}));
    CHECK(::faccessat(small, kName, F_OK, 0) != 0);
    CHECK(::faccessat(small, ".gpustasis-1.img.part", F_OK, 0) != 0);
    ::close(small);
    CHECK(::umount2(dir.path("small").c_str(), MNT_DETACH) == 0);
}

void a_failed_write_keeps_the_older_image() {
    const sample::TempDir dir;
    Watched memory;
    memory.map(4096, sample::random_bytes(16 * 4096, 1));
    write_image(dir.fd(), kName, info_of(memory), memory, {});
    const Buffer before = sample::read_file(dir.fd(), kName);
    memory.reads = 0;
    memory.fail_at = 3;
    CHECK_THROWS(Errc::io, write_image(dir.fd(), kName, info_of(memory), memory, {}));
    CHECK(sample::read_file(dir.fd(), kName) == before);
    CHECK(!dir.has(".gpustasis-1.img.part"));
}

void a_stale_part_is_replaced_and_not_followed() {
    const sample::TempDir dir;
    sample::write_file(dir.fd(), "precious", sample::pattern_bytes(10));
    CHECK(::symlinkat("precious", dir.fd(), ".gpustasis-1.img.part") == 0);
    Memory memory;
    memory.map(4096, Buffer(4096, std::byte{1}));
    write_image(dir.fd(), kName, info_of(memory), memory, {});
    CHECK(sample::read_file(dir.fd(), "precious") == sample::pattern_bytes(10));
    ImageReader::open(dir.fd(), kName).verify(1);
    CHECK(!dir.has(".gpustasis-1.img.part"));
}

void only_the_owner_can_read_an_image() {
    const sample::TempDir dir;
    Memory memory;
    write_image(dir.fd(), kName, info_of(memory), memory, {});
    struct stat status {};
    CHECK(::fstatat(dir.fd(), kName, &status, 0) == 0);
    CHECK((status.st_mode & 0777) == 0600);
}

void what_breaks_a_limit_is_refused() {
    const sample::TempDir dir;
    Memory memory;
    memory.map(0x10000, Buffer(8192, std::byte{1}));
    const auto refused = [&](auto change) {
        ImageInfo info = info_of(memory);
        WriteOptions options;
        change(info, options);
        CHECK_THROWS(Errc::bad_argument, write_image(dir.fd(), kName, info, memory, options));
    };
    refused([](ImageInfo& info, auto&) { info.pid = 0; });
    refused([](ImageInfo& info, auto&) { info.pid = 0x80000000; });
    refused([](ImageInfo& info, auto&) { info.comm = "sixteen bytes ok"; });
    refused([](ImageInfo& info, auto&) { info.comm = std::string("a\0b", 3); });
    refused([](ImageInfo& info, auto&) { info.driver_version.assign(32, '1'); });
    refused([](ImageInfo& info, auto&) { info.gpus[0].name.assign(256, 'n'); });
    refused([](ImageInfo& info, auto&) { info.gpus.resize(257); });
    refused([](ImageInfo& info, auto&) { info.state_before = static_cast<ProcessState>(4); });
    refused([](ImageInfo& info, auto&) { info.chunk_size = 2048; });
    refused([](ImageInfo& info, auto&) { info.chunk_size = 5000; });
    refused([](ImageInfo& info, auto&) { info.chunk_size = 8U << 20; });
    refused([](ImageInfo& info, auto&) { info.regions[0].address += 1; });
    refused([](ImageInfo& info, auto&) { info.regions[0].length = 0; });
    refused([](ImageInfo& info, auto&) { info.regions[0].length += 1; });
    refused([](ImageInfo& info, auto&) { info.regions[0].length = std::uint64_t{1} << 57; });
    refused([](ImageInfo& info, auto&) { info.regions[0].length = std::uint64_t{1} << 40; });
    refused([](ImageInfo& info, auto&) { info.regions[0].protection = 8; });
    refused([](ImageInfo& info, auto&) { info.regions.push_back(info.regions[0]); });
    refused([](auto&, WriteOptions& options) { options.lz4_acceleration = 0; });
    refused([](auto&, WriteOptions& options) { options.alignment = 3; });
    refused([](auto&, WriteOptions& options) { options.alignment = 8192; });
    for (const char* name : {"", ".", "..", "a/b"})
        CHECK_THROWS(Errc::bad_argument, write_image(dir.fd(), name, info_of(memory), memory, {}));
    CHECK(dir.empty());
}

} // namespace

int main() {
    memory_needed_does_not_grow_with_the_image(); // first: the peak of others would hide its own
    the_file_does_not_depend_on_threads();
    chunks_are_read_in_parallel();
    what_is_lent_makes_the_same_file();
    who_waits_for_what_is_lent_ends_with_a_failed_write();
    a_failing_source_leaves_nothing_behind();
    a_write_that_fails_leaves_nothing_behind();
    a_full_disk_leaves_nothing_behind();
    a_failed_write_keeps_the_older_image();
    a_stale_part_is_replaced_and_not_followed();
    only_the_owner_can_read_an_image();
    what_breaks_a_limit_is_refused();
}
