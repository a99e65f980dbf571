// SPDX-License-Identifier: Apache-2.0
/// Files read and written past the page cache.
///
/// It wins where there is a disk: no copy, no memory taken from the job, no writeback to wait for at
/// the sync, and writes of several threads into space that is reserved run side by side (open(2),
/// O_DIRECT; docs/performance.md has the figures).
#pragma once

#include "core/unique_fd.hpp"

#include <cstdint>

namespace gpustasis {

/// How chunk data reaches a file.
enum class IoMode : std::uint8_t {
    automatic, ///< direct where the file system says that it can (statx, STATX_DIOALIGN)
    buffered,
    direct, ///< an error where it cannot
};

/// Open the file of `fd` once more for direct I/O with these flags (O_RDONLY or O_WRONLY). None
/// where the file system does not offer it, or `mode` is buffered.
/// Throws Error: unsupported if `mode` is direct and it is not to be had, io.
UniqueFd open_direct(int fd, int flags, IoMode mode);

/// Whether more than half of the file is in the page cache, going by samples of it: then direct reads
/// would be slower.
bool is_mostly_cached(int fd, std::uint64_t size) noexcept;

} // namespace gpustasis
