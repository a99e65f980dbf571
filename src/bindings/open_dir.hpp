// SPDX-License-Identifier: Apache-2.0
/// Directories by path, as Python names them.
#pragma once

#include "core/error.hpp"
#include "core/unique_fd.hpp"

#include <fcntl.h>

#include <cerrno>
#include <filesystem>

namespace gpustasis::bindings {

/// Throws Error: io.
inline UniqueFd open_dir(const std::filesystem::path& path) {
    UniqueFd dir(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!dir)
        throw io_error(path.string(), errno);
    return dir;
}

/// The directory that the file `path` is in.
inline UniqueFd open_dir_of(const std::filesystem::path& path) {
    return open_dir(path.has_parent_path() ? path.parent_path() : ".");
}

} // namespace gpustasis::bindings
