// SPDX-License-Identifier: Apache-2.0
#include "core/file.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace gpustasis {
namespace {

constexpr std::size_t kMaxNameSize = 240; // leaves room for the name while in part
constexpr mode_t kMode = 0600;            // as CRIU's images: they hold a task's memory

struct stat status_of(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0)
        throw io_error("fstat", errno);
    return status;
}

} // namespace

UniqueFd open_regular(int dir_fd, const std::string& name) {
    // O_NONBLOCK: a FIFO put in the place of an image must not hold us up.
    UniqueFd fd(::openat(dir_fd, name.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
    if (fd.get() < 0)
        throw io_error("open", errno);
    if (!S_ISREG(status_of(fd.get()).st_mode))
        throw Error(Errc::corrupt_data, "not a regular file");
    return fd;
}

std::uint64_t file_size(int fd) {
    return static_cast<std::uint64_t>(status_of(fd).st_size);
}

void read_at(int fd, std::uint64_t offset, MutBytes out) {
    while (!out.empty()) {
        const ssize_t got = ::pread(fd, out.data(), out.size(), static_cast<off_t>(offset));
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            throw io_error("read", errno);
        if (got == 0)
            throw Error(Errc::corrupt_data, "file ends at " + std::to_string(offset));
        out = out.subspan(static_cast<std::size_t>(got));
        offset += static_cast<std::uint64_t>(got);
    }
}

std::vector<std::byte> read_part(int fd, std::uint64_t offset, std::uint64_t size) {
    std::vector<std::byte> bytes(size);
    read_at(fd, offset, bytes);
    return bytes;
}

void write_at(int fd, std::uint64_t offset, Bytes bytes) {
    while (!bytes.empty()) {
        const ssize_t put = ::pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
        if (put < 0 && errno == EINTR)
            continue;
        if (put <= 0)
            throw io_error("write", put < 0 ? errno : EIO);
        bytes = bytes.subspan(static_cast<std::size_t>(put));
        offset += static_cast<std::uint64_t>(put);
    }
}

void begin_write_back(int fd, std::uint64_t offset, std::uint64_t size) noexcept {
    const std::uint64_t first = offset / kAheadSpan;
    const std::uint64_t last = (offset + size) / kAheadSpan;
    if (first != last)
        (void)::sync_file_range(fd, static_cast<off_t>(first * kAheadSpan),
                                static_cast<off_t>((last - first) * kAheadSpan),
                                SYNC_FILE_RANGE_WRITE);
}

void begin_read_ahead(int fd, std::uint64_t offset, std::uint64_t size) noexcept {
    const std::uint64_t last = (offset + size) / kAheadSpan;
    if (offset < size || offset / kAheadSpan != last)
        (void)::posix_fadvise(fd, static_cast<off_t>((last + 1) * kAheadSpan),
                              static_cast<off_t>(kAheadSpan), POSIX_FADV_WILLNEED);
}

bool lock_file(int fd, int how, int patience_ms, const std::string& what) {
    for (int waited = 0; ::flock(fd, how | LOCK_NB) != 0;) {
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            throw io_error("cannot lock " + what, errno);
        if (waited >= patience_ms)
            return false;
        ::poll(nullptr, 0, 1);
        ++waited;
    }
    return true;
}

PartFile::PartFile(int dir_fd, const std::string& name)
    : dir_fd_(dir_fd), name_(name), part_(part_name(name)) {
    if (name.empty() || name == "." || name == ".." || name.size() > kMaxNameSize ||
        name.find('/') != std::string::npos || name.find('\0') != std::string::npos)
        throw Error(Errc::bad_argument, "not a plain file name: " + name);
    if (::unlinkat(dir_fd_, part_.c_str(), 0) != 0 && errno != ENOENT)
        throw io_error("remove " + part_, errno);
    fd_ = UniqueFd(::openat(dir_fd_, part_.c_str(),
                            O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, kMode));
    if (fd_.get() < 0)
        throw io_error("create " + part_, errno);
}

PartFile::~PartFile() {
    if (!committed_)
        ::unlinkat(dir_fd_, part_.c_str(), 0);
}

void PartFile::sync() {
    if (::fsync(fd_.get()) != 0)
        throw io_error("sync " + part_, errno);
    synced_ = true;
}

void PartFile::commit() {
    if (!synced_)
        sync();

    // Two writers of one name would each have taken the other's part for a stale one.
    struct stat named {};
    if (::fstatat(dir_fd_, part_.c_str(), &named, AT_SYMLINK_NOFOLLOW) != 0)
        throw io_error("find " + part_ + " again", errno);
    const struct stat ours = status_of(fd_.get());
    if (named.st_dev != ours.st_dev || named.st_ino != ours.st_ino) {
        committed_ = true; // theirs, so not for us to remove
        throw io_error(part_ + " was replaced while it was written", EBUSY);
    }

    // Opened before the rename: dir_fd_ may be one that cannot be synced (O_PATH, AT_FDCWD).
    const UniqueFd dir(::openat(dir_fd_, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (dir.get() < 0)
        throw io_error("open the directory of " + name_, errno);
    if (::renameat(dir_fd_, part_.c_str(), dir_fd_, name_.c_str()) != 0)
        throw io_error("rename " + part_, errno);
    committed_ = true;
    if (::fsync(dir.get()) != 0) {
        const int error_number = errno;
        ::unlinkat(dir_fd_, name_.c_str(), 0);
        throw io_error("sync the directory of " + name_, error_number);
    }
}

} // namespace gpustasis
