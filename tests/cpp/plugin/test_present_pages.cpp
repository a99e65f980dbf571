// SPDX-License-Identifier: Apache-2.0
// Pages of a tmpfs are written by many threads at once; where there is none, nothing is written, and nobody dies of it.
#include "check.hpp"
#include "sample.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/unique_fd.hpp"
#include "core/workers.hpp"
#include "cuda_plugin/arena_dump.hpp"
#include "cuda_plugin/arena_output.hpp"
#include "cuda_plugin/present_pages.hpp"

#include <fcntl.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstddef>
#include <future>
#include <optional>
#include <string>
#include <thread>

using namespace gpustasis;
using sample::Buffer;

namespace {

thread_local bool stands_still = false; // in its next write(2), until may_go
std::atomic<bool> somebody_stands = false;
std::atomic<bool> may_go = false;

constexpr std::size_t kMib = 1U << 20;
constexpr std::size_t kChunk = 64U << 10;
constexpr std::size_t kPages = 8 * kMib;
constexpr std::size_t kRoom = 2 * kMib;

struct Place {
    sample::TempDir memory{"/dev/shm"};
    UniqueFd file(const char* name, std::size_t size) const {
        UniqueFd fd(::open(memory.path(name).c_str(), O_RDWR | O_CREAT, 0600));
        CHECK(fd);
        write_at(fd.get(), 0, sample::random_bytes(size, 1));
        return fd;
    }
};

Buffer read(int file, std::uint64_t offset, std::size_t size) {
    Buffer bytes(size);
    read_at(file, offset, bytes);
    return bytes;
}

void bytes_are_where_they_were_put() {
    const Place place;
    const UniqueFd file = place.file("x", kPages);
    const auto try_write = [&](std::uint64_t at, Bytes bytes) {
        return try_write_present(file.get(), kPages, at, bytes);
    };
    Buffer wanted = read(file.get(), 0, kPages);
    for (const auto& [at, size] : {std::pair<std::size_t, std::size_t>{0, 1},
                                   {4095, 2},
                                   {kMib + 17, kMib},
                                   {kPages - kChunk, kChunk}}) {
        const Buffer bytes = sample::random_bytes(size, at + 2);
        std::ranges::copy(bytes, wanted.begin() + static_cast<std::ptrdiff_t>(at));
        CHECK(try_write(at, bytes));
    }
    CHECK(read(file.get(), 0, kPages) == wanted);
}

void what_is_beyond_is_not_written() {
    const Place place;
    const UniqueFd file = place.file("x", kPages);
    const Buffer before = read(file.get(), 0, kPages);
    const auto try_write = [&](std::uint64_t at, Bytes bytes) {
        return try_write_present(file.get(), kPages, at, bytes);
    };
    const Buffer bytes = sample::random_bytes(kChunk, 3);
    CHECK(!try_write(kPages - kChunk + 1, bytes) && !try_write(kPages, bytes));
    CHECK(!try_write(~std::uint64_t{0}, bytes));
    CHECK(read(file.get(), 0, kPages) == before && file_size(file.get()) == kPages);
    CHECK(!try_write_present(file.get(), 0, 0, bytes));
    CHECK(!try_write_present(-1, kPages, 0, bytes));
    CHECK(!try_write_present(file.get(), kPages - 1, kPages - kChunk,
                             bytes)); // its last page is there
}

void a_file_that_was_cut_is_no_signal() {
    const Place place;
    const UniqueFd file = place.file("x", kPages);
    const auto try_write = [&](std::uint64_t at, Bytes bytes) {
        return try_write_present(file.get(), kPages, at, bytes);
    };
    CHECK(::ftruncate(file.get(), kMib) == 0);
    const Buffer bytes = sample::random_bytes(kChunk, 4);
    CHECK(!try_write(2 * kMib, bytes) && !try_write(kMib - 4096, bytes));
    CHECK(try_write(kMib - kChunk, bytes));
    CHECK(read(file.get(), kMib - kChunk, kChunk) == bytes && file_size(file.get()) == kMib);
}

// A hole in a tmpfs that is full.
void a_page_that_memory_is_missing_for_is_no_signal() {
    const sample::TempDir dir;
    CHECK(::mkdir(dir.path("full").c_str(), 0700) == 0);
    CHECK(::mount("tmpfs", dir.path("full").c_str(), "tmpfs", 0,
                  ("size=" + std::to_string(kRoom)).c_str()) == 0);
    {
        const UniqueFd file(::open(dir.path("full/x").c_str(), O_RDWR | O_CREAT, 0600));
        CHECK(file && ::ftruncate(file.get(), kPages) == 0);
        const auto try_write = [&](std::uint64_t at, Bytes bytes) {
            return try_write_present(file.get(), kPages, at, bytes);
        };
        const Buffer bytes = sample::random_bytes(kChunk, 5);
        std::size_t written = 0;
        while (written < kPages && try_write(written, bytes))
            written += kChunk;
        CHECK(written != 0 && written <= kRoom);
        CHECK(read(file.get(), 0, kChunk) == bytes);
        try {
            write_at(file.get(), written, bytes);
            CHECK(false && "there is room");
        } catch (const Error& e) {
            CHECK(e.error_number() == ENOSPC);
        }
    }
    CHECK(::umount2(dir.path("full").c_str(), MNT_DETACH) == 0);
}

constexpr std::size_t kImage = 24 * kMib;
constexpr std::size_t kPooled = 16 * kMib;

/// An image of kImage bytes that is being written into an arena whose pool had `pooled`.
class Image {
public:
    explicit Image(std::size_t pooled) {
        for (const char* name : {"", "/pool", "/x"})
            CHECK(::mkdir((config_.path + name).c_str(), 0700) == 0);
        if (pooled != 0) {
            const UniqueFd file(::open((config_.path + "/pool/0").c_str(), O_RDWR | O_CREAT, 0600));
            write_at(file.get(), 0, sample::random_bytes(pooled, 6));
        }
        top_ = UniqueFd(::open(config_.path.c_str(), O_RDONLY | O_DIRECTORY));
        directory_ = UniqueFd(::open((config_.path + "/x").c_str(), O_RDONLY | O_DIRECTORY));
        room_.emplace(config_, top_.get(), "x");
        room_->prepare();
        output_.emplace(*room_, top_.get(), directory_.get(), "x.img", 4096);
    }
    void write_chunk(std::size_t at) {
        Buffer chunk(wanted_.begin() + static_cast<std::ptrdiff_t>(at),
                     wanted_.begin() + static_cast<std::ptrdiff_t>(at + kChunk));
        output_->write(at, chunk, kChunk);
    }
    /// By several threads, from `begin` on.
    void write_rest(std::size_t begin = 0) {
        std::atomic<std::size_t> next = begin;
        FirstFailure failure;
        run_workers(4, failure, [&] {
            for (std::size_t at = next.fetch_add(kChunk); at < kImage; at = next.fetch_add(kChunk))
                write_chunk(at);
        });
    }
    void require_written() {
        output_->commit(kImage);
        const UniqueFd image(::openat(directory_.get(), "x.img", O_RDONLY));
        CHECK(image && file_size(image.get()) == kImage);
        CHECK(read(image.get(), 0, kImage) == wanted_);
    }

private:
    Place place_;
    ArenaConfig config_ = [this] {
        ArenaConfig config;
        config.path = place_.memory.path("a");
        return config;
    }();
    UniqueFd top_, directory_;
    std::optional<ArenaRoom> room_;
    std::optional<ArenaOutput> output_;
    const Buffer wanted_ = sample::random_bytes(kImage, 7);
};

// Of the pool, or new: threads that meet write at once, or in turn. Each byte has to be there.
void an_image_is_what_its_threads_have_written() {
    for (const std::size_t pooled : {std::size_t{0}, kPooled}) { // the image is larger
        Image image(pooled);
        image.write_rest();
        image.require_written();
    }
}

// write(2) lets one thread at a time into a file, whether or not it has the pages.
void nobody_waits_for_another_where_there_are_pages() {
    Image image(kPooled);
    std::thread first([&] {
        stands_still = true;
        image.write_chunk(0);
        stands_still = false;
    });
    somebody_stands.wait(false);
    std::future<void> others = std::async(std::launch::async, [&] {
        for (const std::size_t at : {kChunk, kPooled - kChunk})
            image.write_chunk(at);
    });
    const bool waited = others.wait_for(std::chrono::seconds(20)) != std::future_status::ready;
    may_go = true;
    may_go.notify_one();
    first.join();
    others.get();
    CHECK(!waited);
    image.write_rest(2 * kChunk);
    image.require_written();
}

} // namespace

// In place of the C library's.
extern "C" ssize_t pwrite(int file, const void* bytes, std::size_t size, off_t offset) {
    if (stands_still) {
        somebody_stands = true;
        somebody_stands.notify_one();
        may_go.wait(false);
    }
    return ::syscall(SYS_pwrite64, file, bytes, size, offset);
}

int main() {
    CHECK(::unshare(CLONE_NEWNS) == 0 && // what is mounted goes away with this program
          ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0);
    bytes_are_where_they_were_put();
    what_is_beyond_is_not_written();
    a_file_that_was_cut_is_no_signal();
    a_page_that_memory_is_missing_for_is_no_signal();
    an_image_is_what_its_threads_have_written();
    nobody_waits_for_another_where_there_are_pages();
}
