// SPDX-License-Identifier: Apache-2.0
#include "core/chunk_io.hpp"

#include "core/direct_io.hpp"
#include "core/error.hpp"
#include "core/file.hpp"

#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

namespace gpustasis {
namespace {

// Returns how many bytes were read: fewer than asked for where the file ends, or where it cannot be
// read directly any further.
std::size_t read_direct(int fd, std::uint64_t offset, MutBytes out) noexcept {
    std::size_t done = 0;
    while (done < out.size()) {
        const ssize_t got =
            ::pread(fd, out.data() + done, out.size() - done, static_cast<off_t>(offset + done));
        if (got <= 0)
            break; // an error, or the end: the page cache's read says which
        done += static_cast<std::size_t>(got);
        if (done % kDirectAlignment != 0)
            break;
    }
    return done;
}

// Space is reserved ahead of the writers: within it their writes run side by side, and what
// lengthens the file makes all others wait. Unused space is given back at the end.
constexpr std::uint64_t kReserveStep = 64U << 20;

int reserve_space(int fd, std::uint64_t offset, std::uint64_t size) noexcept {
    int rc;
    do
        rc = ::fallocate(fd, 0, static_cast<off_t>(offset), static_cast<off_t>(size));
    while (rc != 0 && errno == EINTR);
    return rc == 0 ? 0 : errno;
}

// Returns how many bytes are written: all, or fewer where the rest cannot be written directly (the
// file system wants more of alignment than it said, or stopped in the middle of a block).
std::size_t write_direct(int fd, std::uint64_t offset, Bytes bytes) {
    std::size_t done = 0;
    while (done < bytes.size()) {
        const ssize_t put = ::pwrite(fd, bytes.data() + done, bytes.size() - done,
                                     static_cast<off_t>(offset + done));
        if (put < 0 && errno == EINTR)
            continue;
        if (put < 0 && errno == EINVAL)
            return done;
        if (put <= 0)
            throw io_error("write", put < 0 ? errno : EIO);
        done += static_cast<std::size_t>(put);
    }
    return done;
}

} // namespace

ChunkInput::ChunkInput(std::shared_ptr<const UniqueFd> file, std::uint64_t begin,
                       std::uint64_t size, IoMode mode)
    : file_(std::move(file)), begin_(begin), size_(size), mode_(mode) {
    direct_ = open_direct(file_->get(), O_RDONLY, mode);
    if (direct_ && mode == IoMode::automatic && is_mostly_cached(file_->get(), begin + size))
        direct_.reset();
}

Bytes ChunkInput::read(std::uint64_t offset, std::size_t size, MutBytes buffer) const {
    offset += begin_;
    std::size_t done = 0;
    if (direct_ && is_aligned(buffer) && offset % kDirectAlignment == 0)
        done = read_direct(direct_.get(), offset, buffer.first(direct_size(size)));
    if (done < size && mode_ == IoMode::direct && offset + size <= file_size(file_->get()))
        throw Error(Errc::unsupported, "direct I/O was asked for, and a read was refused");
    if (done < size)
        read_at(file_->get(), offset + done, buffer.first(size).subspan(done));
    return buffer.first(size);
}

ChunkOutput::ChunkOutput(int fd, IoMode mode, std::uint32_t alignment) : fd_(fd), mode_(mode) {
    if (alignment % kDirectAlignment == 0)
        direct_ = open_direct(fd, O_WRONLY, mode);
    else if (mode == IoMode::direct)
        throw Error(Errc::unsupported, "direct I/O needs an alignment of " +
                                           std::to_string(kDirectAlignment) + ", not " +
                                           std::to_string(alignment));
}

// Whether there is space up to `end`. False: this file system reserves none. Throws if it is full.
bool ChunkOutput::reserve(std::uint64_t end) {
    if (end <= reserved_.load(std::memory_order_acquire))
        return true;
    const std::lock_guard lock(mutex_);
    std::uint64_t reserved = reserved_.load(std::memory_order_relaxed);
    if (end <= reserved)
        return true;
    if (!reserving_)
        return false;
    int error = reserve_space(fd_, reserved, std::max(kReserveStep, end - reserved));
    if (error == ENOSPC || error == EFBIG || error == EDQUOT) {
        // Nearly full: what is needed may still fit, once what the attempt took is given back.
        if (::ftruncate(fd_, static_cast<off_t>(reserved)) != 0)
            throw io_error("write", errno);
        error = reserve_space(fd_, reserved, end - reserved);
        if (error == 0) {
            reserved_.store(end, std::memory_order_release);
            return true;
        }
    }
    if (error == EOPNOTSUPP) {
        reserving_ = false;
        return false;
    }
    if (error != 0)
        throw io_error("write", error);
    reserved_.store(std::max(reserved + kReserveStep, end), std::memory_order_release);
    return true;
}

bool ChunkOutput::reserve_all(std::uint64_t size) {
    const std::lock_guard lock(mutex_);
    const int error = reserve_space(fd_, 0, size);
    if (error == 0) {
        reserved_.store(size, std::memory_order_release);
        return true;
    }
    struct statvfs room {};
    if (error == EOPNOTSUPP && ::fstatvfs(fd_, &room) == 0) {
        reserving_ = false;
        if (room.f_bavail >= size / room.f_frsize + 1)
            return false;
    }
    throw Error(io_error("reserve " + std::to_string(size >> 20) + " MiB",
                         error == EOPNOTSUPP ? ENOSPC : error));
}

void ChunkOutput::write(std::uint64_t offset, MutBytes buffer, std::size_t size) {
    if (size == 0)
        return;
    // Space that cannot be reserved costs speed only: who asked for direct I/O by name gets it.
    if (direct_ && is_aligned(buffer) &&
        (reserve(offset + direct_size(size)) || mode_ == IoMode::direct)) {
        const MutBytes whole = buffer.first(direct_size(size));
        std::ranges::fill(whole.subspan(size), std::byte{0});
        const std::size_t done = write_direct(direct_.get(), offset, whole);
        if (done < size && mode_ == IoMode::direct)
            throw Error(Errc::unsupported, "direct I/O was asked for, and a write was refused");
        if (done < size)
            write_at(fd_, offset + done, buffer.first(size).subspan(done));
        return;
    }
    // The kernel lets one thread at a time write to a file through the page cache, and the others spin for it: two of them
    // wrote no faster than one, for twice the processor time. Who sleeps leaves it to those that make chunks.
    const std::lock_guard turn(buffered_);
    write_at(fd_, offset, buffer.first(size));
}

void ChunkOutput::finish(std::uint64_t size) {
    // What is written directly ends with a block, also where no space was reserved.
    if ((direct_ || reserved_ != 0) && ::ftruncate(fd_, static_cast<off_t>(size)) != 0)
        throw io_error("cut to its size", errno);
}

} // namespace gpustasis
