// SPDX-License-Identifier: Apache-2.0
#include "core/trusted_directory.hpp"

#include "core/error.hpp"
#include "core/file.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <span>

namespace gpustasis {

void require_trusted(int fd, const std::string& path, uid_t user) {
    struct stat status {};
    if (::fstat(fd, &status) != 0)
        throw io_error("cannot examine " + path, errno);
    const bool own = status.st_uid == 0 || status.st_uid == user;
    if (own && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0)
        return;
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", status.st_mode & 07777U);
    throw Error(Errc::bad_argument, path + " belongs to user " + std::to_string(status.st_uid) +
                                        " and has mode " + mode + ": others can write there");
}

UniqueFd open_trusted(const std::string& base, const std::vector<std::string>& parts,
                      IfMissing missing, uid_t user) {
    std::string path = base;
    UniqueFd directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    for (const std::string& part : parts) {
        if (!directory)
            break;
        path += "/" + part;
        if (missing == IfMissing::make && ::mkdirat(directory.get(), part.c_str(), S_IRWXU) != 0 &&
            errno != EEXIST)
            throw io_error("cannot make " + path, errno);
        directory = UniqueFd(::openat(directory.get(), part.c_str(),
                                      O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
        if (directory)
            require_trusted(directory.get(), path, user);
    }
    if (!directory && (errno != ENOENT || missing == IfMissing::make))
        throw io_error("cannot open " + path, errno);
    return directory;
}

std::string read_trusted(int directory, const std::string& name, const std::string& path,
                         std::uint64_t max) {
    const UniqueFd file(
        ::openat(directory, name.c_str(), O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file && errno == ENOENT)
        return {};
    if (!file && errno == ELOOP)
        throw Error(Errc::bad_argument, path + " is a symbolic link");
    if (!file)
        throw io_error("cannot open " + path, errno);
    struct stat status {};
    if (::fstat(file.get(), &status) != 0)
        throw io_error("cannot examine " + path, errno);
    if (!S_ISREG(status.st_mode))
        throw Error(Errc::bad_argument, path + " is no regular file");
    require_trusted(file.get(), path);
    const std::uint64_t size = file_size(file.get());
    if (size == 0 || size > max)
        throw Error(Errc::bad_argument, path + " has " + std::to_string(size) +
                                            " bytes: it can have 1 to " + std::to_string(max));
    std::string text(size, '\0');
    read_at(file.get(), 0, std::as_writable_bytes(std::span(text)));
    return text;
}

LockedFile open_locked(int directory, const std::string& name, IfMissing missing, int patience_ms,
                       uid_t user) {
    const int flags = O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
    for (;;) {
        LockedFile file;
        file.fd = UniqueFd(::openat(directory, name.c_str(),
                                    missing == IfMissing::make ? flags | O_CREAT : flags,
                                    S_IRUSR | S_IWUSR));
        if (!file.fd && errno == ENOENT && missing == IfMissing::nothing)
            return file;
        if (!file.fd)
            throw io_error("cannot open " + name, errno);
        require_trusted(file.fd.get(), name, user);
        file.locked = lock_file(file.fd.get(), LOCK_EX, patience_ms, name);
        struct stat status {};
        if (!file.locked || ::fstat(file.fd.get(), &status) != 0 || status.st_nlink != 0)
            return file;
        // Its holder has removed it, between our two calls.
    }
}

} // namespace gpustasis
