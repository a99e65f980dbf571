// SPDX-License-Identifier: Apache-2.0
/// Directories of ours that criu, being root, believes: nobody else may have written there.
#pragma once

#include "core/unique_fd.hpp"

#include <sys/types.h>
#include <unistd.h>

#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

enum class IfMissing { nothing, make };

/// The directory `base`/`parts[0]`/`parts[1]`…; `base` is the system's. No part may be a link, each
/// must belong to root or to `user`, and none be writable for others. What is
/// missing is made with mode 0700, or the result is no descriptor. Throws Error: io; bad_argument
/// naming the directory that could be somebody else's.
UniqueFd open_trusted(const std::string& base, const std::vector<std::string>& parts,
                      IfMissing missing, uid_t user = ::geteuid());

/// What `fd` is must be as said above. Throws Error: io, bad_argument naming `path`.
void require_trusted(int fd, const std::string& path, uid_t user = ::geteuid());

/// The text of the file `name` of a directory that open_trusted() has given, of 1 to `max` bytes; empty: it is
/// not there. `path` names it in errors. Throws Error: io; bad_argument if it is a link, no regular file, too
/// long, or as require_trusted().
std::string read_trusted(int directory, const std::string& name, const std::string& path,
                         std::uint64_t max);

struct LockedFile {
    UniqueFd fd;         ///< none: there is no such file
    bool locked = false; ///< by this process; else another holds the lock, and `fd` is its file
};

/// The file `name` of a directory that open_trusted() has given, locked with flock() until its descriptor is
/// closed, which tells others that this process lives: never a file that another has removed meanwhile.
/// What is missing is made with mode 0600. Another's lock is waited for as lock_file() does.
/// Throws Error: io; bad_argument as require_trusted().
LockedFile open_locked(int directory, const std::string& name, IfMissing missing, int patience_ms,
                       uid_t user = ::geteuid());

} // namespace gpustasis
