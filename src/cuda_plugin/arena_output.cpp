// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/arena_output.hpp"

#include "core/error.hpp"
#include "cuda_plugin/arena_dump.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/present_pages.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <exception>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

constexpr std::uint32_t kMaxAlignment = 4096; // docs/format.md: of chunks in the file
// An image that takes a quarter of its file, or less, is copied out of it. Below this a file is soon filled anew.
constexpr std::uint64_t kMuchSmaller = 4;
constexpr std::uint64_t kWorthReturning = std::uint64_t{16} << 20;
constexpr std::size_t kCopied = std::size_t{256}
                                << 10; // at once: it stays in the processor's cache

} // namespace

UniqueFd take_from_pool(int arena, int directory, const std::string& part) {
    const UniqueFd pool(
        ::openat(arena, kArenaPool, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!pool && errno == ENOENT)
        return {};
    if (!pool)
        throw io_error(std::string("cannot open the arena's ") + kArenaPool, errno);
    std::vector<std::pair<off_t, std::string>> files;
    for (const std::string& name : names_in(pool.get())) {
        struct stat status {};
        if (::fstatat(pool.get(), name.c_str(), &status, AT_SYMLINK_NOFOLLOW) == 0 &&
            S_ISREG(status.st_mode) && status.st_nlink == 1)
            files.emplace_back(status.st_size, name);
    }
    std::ranges::sort(files, std::ranges::greater());
    for (const auto& [size, name] : files) {
        if (::renameat(pool.get(), name.c_str(), directory, part.c_str()) != 0) {
            if (errno == ENOENT)
                continue; // another dump has it
            throw io_error("cannot take " + name + " from the arena's pool", errno);
        }
        UniqueFd file(::openat(directory, part.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
        if (!file)
            throw io_error("cannot open " + part, errno);
        return file;
    }
    return {};
}

ArenaOutput::ArenaOutput(ArenaRoom& room, int arena, int directory, const std::string& name,
                         std::uint32_t alignment)
    : room_(room), arena_(arena), directory_(directory), name_(name),
      part_(PartFile::part_name(name)), alignment_(alignment),
      file_(take_from_pool(arena, directory, part_)) {
    if (!file_) {
        file_ = UniqueFd(::openat(directory, part_.c_str(),
                                  O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                                  S_IRUSR | S_IWUSR));
        if (!file_)
            throw io_error("create " + part_, errno);
        return;
    }
    paid_ = backed_ = file_size(file_.get());
    // Between the header and the first chunk there are zeros. Everything else is written.
    const std::array<std::byte, kMaxAlignment> zeros{};
    put(0, zeros);
}

ArenaOutput::~ArenaOutput() {
    if (committed_)
        return;
    ::unlinkat(directory_, part_.c_str(), 0);
    file_.reset();
    room_.give(paid_);
}

void ArenaOutput::reserve(std::uint64_t size) {
    if (size > paid_) {
        pay(size - paid_);
    } else if (size != 0 && size < paid_) {
        cut(size);
        give(paid_ - size);
        backed_ = size;
    }
    if (size != 0)
        paid_ = size;
}

void ArenaOutput::cut(std::uint64_t size) {
    if (::ftruncate(file_.get(), static_cast<off_t>(size)) != 0)
        throw io_error("cut " + part_ + " to its size", errno);
}

void ArenaOutput::pay(std::uint64_t bytes) {
    const std::uint64_t of_pool = room_.take(bytes);
    added_ += static_cast<std::int64_t>(bytes) - static_cast<std::int64_t>(of_pool);
}

void ArenaOutput::give(std::uint64_t bytes) noexcept {
    room_.give(bytes);
    added_ -= static_cast<std::int64_t>(bytes);
}

// What is behind the pages that the file has already.
void ArenaOutput::take(std::uint64_t offset, std::uint64_t end) {
    if (end > paid_)
        pay(end - std::max(offset, paid_));
    const std::uint64_t first = std::max(offset, backed_);
    const std::uint64_t last = std::min(end, paid_);
    if (last > first)
        room_.use(last - first, paid_ - last);
}

void ArenaOutput::put(std::uint64_t offset, Bytes bytes) {
    take(offset, offset + bytes.size());
    write_at(file_.get(), offset, bytes);
}

void ArenaOutput::write(std::uint64_t offset, MutBytes buffer, std::size_t size) {
    const std::size_t whole = (size + alignment_ - 1) / alignment_ * alignment_;
    std::ranges::fill(buffer.subspan(size, whole - size), std::byte{0});
    take(offset, offset + whole);
    // As in ChunkOutput::write(): one thread at a time. The others need not wait where there are pages.
    std::unique_lock turn(writing_, std::try_to_lock);
    if (!turn && try_write_present(file_.get(), backed_, offset, buffer.first(whole)))
        return;
    if (!turn)
        turn.lock();
    write_at(file_.get(), offset, buffer.first(whole));
}

// The image has its name last: whoever is killed in between leaves no dump that is whole.
bool ArenaOutput::return_to_pool(std::uint64_t size) {
    if (backed_ < kWorthReturning || size > backed_ / kMuchSmaller)
        return false;
    const UniqueFd pool(
        ::openat(arena_, kArenaPool, O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!pool)
        return false;
    bool taken = false;
    const std::string copy = PartFile::part_name(part_);
    try {
        std::vector<std::byte> buffer(kCopied);
        taken = room_.try_take(size, backed_);
        if (!taken)
            return false;
        const UniqueFd file(::openat(directory_, copy.c_str(),
                                     O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC,
                                     S_IRUSR | S_IWUSR));
        if (!file)
            throw io_error("create " + copy, errno);
        for (std::uint64_t done = 0; done < size; done += kCopied) {
            const MutBytes piece = MutBytes(buffer).first(std::min(kCopied, size - done));
            read_at(file_.get(), done, piece);
            write_at(file.get(), done, piece);
        }
        struct stat status {};
        // No other file of this tmpfs has that number as long as this one is there.
        if (::fstat(file_.get(), &status) != 0 ||
            ::renameat(directory_, part_.c_str(), pool.get(),
                       ("returned-" + std::to_string(status.st_ino)).c_str()) != 0)
            throw io_error("give " + part_ + " to the arena's pool", errno);
    } catch (const std::exception&) { // the image is whole where it is
        ::unlinkat(directory_, copy.c_str(), 0);
        if (taken)
            room_.give(size);
        return false;
    }
    added_ += static_cast<std::int64_t>(size);
    if (paid_ > backed_) // reserved, and not written: what was is in a quarter of the file
        give(paid_ - backed_);
    paid_ = size; // the rest is the pool's, as it was
    part_ = copy;
    return true;
}

void ArenaOutput::commit(std::uint64_t size) {
    if (!return_to_pool(size)) {
        cut(size);
        if (paid_ > size) {
            give(paid_ - size);
            paid_ = size;
        }
    }
    if (::renameat(directory_, part_.c_str(), directory_, name_.c_str()) != 0)
        throw io_error("rename " + part_, errno);
    committed_ = true;
}

} // namespace gpustasis
