// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"
#include "sample.hpp"

#include "core/image_writer.hpp"
#include "core/process_memory.hpp"
#include "dropped_memory/missing_pages.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <vector>

using namespace gpustasis;

namespace {

constexpr std::size_t kPage = 4096;
constexpr std::size_t kSize = std::size_t{8} << 20;

bool is_zero_page(std::size_t page) {
    return page % 512 >= 128 && page % 512 < 256; // whole chunks of zeros
}

/// Memory of this process, each page with its number in it or zero, and an image of it.
struct Memory {
    RegionKind kind;
    std::byte* bytes;
    sample::TempDir dir;
    std::optional<ImageReader> image;
    std::optional<MissingPages> missing;

    explicit Memory(RegionKind kind_of) : kind(kind_of) {
        const int flags = kind == RegionKind::shared_anonymous ? MAP_SHARED : MAP_PRIVATE;
        bytes = static_cast<std::byte*>(
            ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, flags | MAP_ANONYMOUS, -1, 0));
        for (std::size_t page = 0; page < kSize / kPage; ++page)
            if (!is_zero_page(page))
                std::memcpy(bytes + page * kPage, &page, sizeof(page));
        ImageInfo info;
        info.pid = 1;
        info.regions = {region()};
        ProcessMemory self(::getpid());
        write_image(dir.fd(), "x.img", info, self, {.threads = 2});
        image.emplace(ImageReader::open(dir.fd(), "x.img"));
        missing.emplace(
            UniqueFd(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK))));
        missing->add(region());
        CHECK(::madvise(bytes, kSize,
                        kind == RegionKind::shared_anonymous ? MADV_REMOVE : MADV_DONTNEED) == 0);
    }
    ~Memory() {
        missing.reset();
        ::munmap(bytes, kSize);
    }
    Region region() const {
        return {reinterpret_cast<std::uint64_t>(bytes), kSize, PROT_READ | PROT_WRITE, kind};
    }
    /// Flip a stored byte of a chunk, or flip it back.
    void flip(std::uint64_t number) const {
        const UniqueFd file(::open(dir.path("x.img").c_str(), O_RDWR | O_CLOEXEC));
        const auto offset = static_cast<off_t>(image->chunk(number).offset);
        char byte = 0;
        CHECK(::pread(file.get(), &byte, 1, offset) == 1);
        byte = static_cast<char>(byte ^ 1);
        CHECK(::pwrite(file.get(), &byte, 1, offset) == 1);
    }
    /// Numbers of the chunks that are not zero.
    std::vector<std::uint64_t> stored_chunks() const {
        std::vector<std::uint64_t> numbers;
        for (std::uint64_t number = 0; number < image->chunk_count(); ++number)
            if (image->chunk(number).encoding != Encoding::zero)
                numbers.push_back(number);
        return numbers;
    }
    /// How many pages of a chunk are there; touches none.
    std::size_t pages_there(std::uint64_t number) const {
        const ChunkInfo chunk = image->chunk(number);
        std::vector<unsigned char> there(chunk.plain_size / kPage);
        CHECK(::mincore(reinterpret_cast<void*>(chunk.address), chunk.plain_size, there.data()) ==
              0);
        return static_cast<std::size_t>(std::ranges::count(there, 1));
    }
    bool is_right(std::size_t page) const {
        const std::size_t wanted = is_zero_page(page) ? 0 : page;
        return std::memcmp(bytes + page * kPage, &wanted, sizeof(wanted)) == 0;
    }
    std::atomic<unsigned> answered = 0;

    /// Answer whoever waits, until `done()`.
    template <class Done>
    void answer_until(const Done& done) {
        pollfd poll{.fd = missing->fd(), .events = POLLIN, .revents = 0};
        while (!done())
            if (::poll(&poll, 1, 10) > 0) {
                missing->answer(*image);
                ++answered;
            }
    }
};

void threads_never_see_that_memory_is_missing(RegionKind kind) {
    Memory memory(kind);
    std::atomic<unsigned> wrong = 0;
    std::atomic<std::size_t> ended = 0;
    std::vector<std::thread> threads;
    for (std::size_t thread = 0; thread < 4; ++thread)
        threads.emplace_back([&, thread] {
            for (std::size_t i = 0; i < kSize / kPage; ++i)
                if (!memory.is_right((i * 37 + thread * 501) % (kSize / kPage)))
                    ++wrong;
            ++ended;
        });
    // A system call as well: the kernel waits as a thread does.
    threads.emplace_back([&] {
        int ends[2];
        CHECK(::pipe(ends) == 0);
        CHECK(::write(ends[1], memory.bytes + kPage, sizeof(std::size_t)) == sizeof(std::size_t));
        std::size_t number = 0;
        CHECK(::read(ends[0], &number, sizeof(number)) == sizeof(number) && number == 1);
        ::close(ends[0]);
        ::close(ends[1]);
        ++ended;
    });
    std::thread filler([&] {
        CHECK(comes_true([&] { return memory.answered > 0; }));
        memory.missing->fill(*memory.image, 2);
        memory.missing->release();
    });
    memory.answer_until([&] { return ended == threads.size(); });
    filler.join();
    for (std::thread& thread : threads)
        thread.join();
    CHECK(wrong == 0);
}

void what_was_written_meanwhile_stays() {
    Memory memory(RegionKind::private_anonymous);
    std::atomic<bool> written = false;
    std::thread writer([&] {
        memory.bytes[5 * kPage] = std::byte{0xee};
        written = true;
    });
    memory.answer_until([&] { return written.load(); });
    writer.join();
    memory.missing->fill(*memory.image, 1);
    memory.missing->release();
    CHECK(memory.bytes[5 * kPage] == std::byte{0xee});
    for (std::size_t page = 0; page < kSize / kPage; ++page)
        CHECK(page == 5 || memory.is_right(page));
    // The regions are let go of: a page that the program drops now is zero.
    CHECK(::madvise(memory.bytes, kSize, MADV_DONTNEED) == 0);
    CHECK(memory.bytes[kPage] == std::byte{0});
}

void a_damaged_chunk_keeps_no_other_from_its_place(unsigned workers) {
    Memory memory(RegionKind::private_anonymous);
    const std::vector<std::uint64_t> stored = memory.stored_chunks();
    CHECK(stored.size() > 4);
    const std::uint64_t waited_for = stored[1];
    const std::uint64_t other = stored[stored.size() - 2];
    const auto is_damaged = [&](std::uint64_t number) {
        return number == waited_for || number == other;
    };
    memory.flip(waited_for);
    memory.flip(other);
    const std::size_t page =
        (memory.image->chunk(waited_for).address - memory.region().address) / kPage + 1;
    std::atomic<bool> read = false;
    std::atomic<bool> right = false;
    std::thread reader([&] {
        right = memory.is_right(page);
        read = true;
    });
    memory.answer_until([&] { return memory.answered > 0; });
    for (int again = 0; again < 2; ++again) {
        try {
            memory.missing->fill(*memory.image, workers);
            CHECK(false && "nothing was thrown");
        } catch (const Error& e) {
            const std::string text = e.what();
            char first[32];
            std::snprintf(first, sizeof first, "0x%llx-",
                          static_cast<unsigned long long>(memory.image->chunk(waited_for).address));
            CHECK(e.code() == Errc::corrupt_data);
            CHECK(text.starts_with("2 of " + std::to_string(memory.image->chunk_count())));
            CHECK(text.find(first) != std::string::npos);
        }
        for (const std::uint64_t number : stored)
            CHECK(memory.pages_there(number) ==
                  (is_damaged(number) ? 0 : memory.image->chunk(number).plain_size / kPage));
    }
    memory.missing->answer_again(*memory.image);
    ::usleep(100'000);
    CHECK(!read); // it has been woken by nobody, and reads no zeros

    // As an error that passes: who waits is answered though no fill() comes.
    memory.flip(waited_for);
    memory.missing->answer_again(*memory.image);
    CHECK(comes_true([&] { return read.load(); }));
    reader.join();
    CHECK(right);
    CHECK(memory.pages_there(other) == 0);
    memory.flip(other);
    memory.missing->fill(*memory.image, workers);
    memory.missing->release();
    for (std::size_t number = 0; number < kSize / kPage; ++number)
        CHECK(memory.is_right(number));
}

void a_process_that_ends_is_told_apart() {
    int ends[2];
    CHECK(::pipe(ends) == 0);
    // The child's memory is its own: a descriptor made there is sent by way of pidfd_getfd.
    const pid_t child = fork_child();
    if (child == 0) {
        auto* bytes = static_cast<std::byte*>(
            ::mmap(nullptr, kSize, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        std::memset(bytes, 7, kSize);
        const long made = ::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK);
        const std::uint64_t told[2] = {static_cast<std::uint64_t>(made),
                                       reinterpret_cast<std::uint64_t>(bytes)};
        static_cast<void>(::write(ends[1], told, sizeof(told)) == 0);
        ::pause();
    }
    std::uint64_t told[2];
    CHECK(::read(ends[0], told, sizeof(told)) == sizeof(told));
    const UniqueFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, child, 0)));
    MissingPages missing(
        UniqueFd(static_cast<int>(::syscall(SYS_pidfd_getfd, pidfd.get(), told[0], 0))));
    ImageInfo info;
    info.pid = 1;
    info.regions = {{told[1], kSize, PROT_READ | PROT_WRITE, RegionKind::private_anonymous}};
    missing.add(info.regions[0]);
    const sample::TempDir dir;
    ProcessMemory memory(child);
    write_image(dir.fd(), "x.img", info, memory, {.threads = 1});
    const ImageReader image = ImageReader::open(dir.fd(), "x.img");
    CHECK(::kill(child, SIGKILL) == 0 && ::waitpid(child, nullptr, 0) == child);
    CHECK_THROWS(Errc::gone, missing.fill(image, 1));
}

} // namespace

int main() {
    threads_never_see_that_memory_is_missing(RegionKind::private_anonymous);
    threads_never_see_that_memory_is_missing(RegionKind::shared_anonymous);
    what_was_written_meanwhile_stays();
    a_damaged_chunk_keeps_no_other_from_its_place(1);
    a_damaged_chunk_keeps_no_other_from_its_place(3);
    a_process_that_ends_is_told_apart();
}
