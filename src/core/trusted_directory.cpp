// SPDX-License-Identifier: Apache-2.0
#include "core/trusted_directory.hpp"

#include "core/error.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>

namespace gpustasis {

void require_trusted(int fd, const std::string& path) {
    struct stat status {};
    if (::fstat(fd, &status) != 0)
        throw io_error("cannot examine " + path, errno);
    const bool own = status.st_uid == 0 || status.st_uid == ::geteuid();
    if (own && (status.st_mode & (S_IWGRP | S_IWOTH)) == 0)
        return;
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", status.st_mode & 07777U);
    throw Error(Errc::bad_argument, path + " belongs to user " + std::to_string(status.st_uid) +
                                        " and has mode " + mode + ": others can write there");
}

UniqueFd open_trusted(const std::string& base, const std::vector<std::string>& parts,
                      IfMissing missing) {
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
            require_trusted(directory.get(), path);
    }
    if (!directory && (errno != ENOENT || missing == IfMissing::make))
        throw io_error("cannot open " + path, errno);
    return directory;
}

} // namespace gpustasis
