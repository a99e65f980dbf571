// SPDX-License-Identifier: Apache-2.0
/// What tells one version of a file from another without keeping the file: its build id, or a hash.
#pragma once

#include "core/requirements.hpp"
#include "core/unique_fd.hpp"

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// Open `path`, if it is a regular file, for reading. Anything else is looked at and not opened: to open
/// a device may do something. nullopt: it is no regular file. Throws Error: io.
std::optional<UniqueFd> open_if_regular(int dir_fd, const std::string& path);

/// As open_if_regular, of an absolute path in the tree below `root_fd`: no link leads out of that.
std::optional<UniqueFd> open_in_root(int root_fd, const std::string& path);

/// The build id in the notes of an ELF file (little-endian, 32 or 64 bits): NT_GNU_BUILD_ID, as linkers
/// write it (gABI, "Note Section"; elf(5)). Empty: there is none, it is longer than
/// format::kMaxBuildId, or this is no ELF file that can be believed. Reads a few KiB of it, 1 MiB at most.
/// Throws Error: io, corrupt_data if the file gets shorter meanwhile.
std::vector<std::byte> find_build_id(int fd);

/// hash128 of the whole file of `size` bytes; empty if that is not done by `deadline`. Throws as
/// find_build_id.
std::vector<std::byte> hash_file(
    int fd, std::uint64_t size,
    std::chrono::steady_clock::time_point deadline = std::chrono::steady_clock::time_point::max());

/// How difference() begins of a file that this process has no right to read.
inline constexpr const char* kMayNotRead = "may not be read";

/// What is there in place of `expected`, whose path `path` is below `root_fd`: "is missing", "has the
/// build id …"; nullopt: nothing tells it from what is expected. What cannot be read is a difference. It
/// is opened only if it has the size, and more than that is expected.
std::optional<std::string> difference(int root_fd, const std::string& path,
                                      const RequiredFile& expected);

/// The same of two that are known: `found` was identified in the way of `expected`.
std::optional<std::string> difference(const RequiredFile& found, const RequiredFile& expected);

/// "build id 1b2c…, 2030336 bytes"; "hash …"; "2030336 bytes".
std::string identity_text(const RequiredFile& file);

} // namespace gpustasis
