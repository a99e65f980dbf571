// SPDX-License-Identifier: Apache-2.0
/// A directory in memory, to which no path leads.
#pragma once

#include "core/unique_fd.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis {

/// An empty one, with the mode of `like`, which holds `limit` bytes at most, and as many files as a pack can,
/// or fewer where those would take much memory beside. It is gone with its last descriptor. Throws Error:
/// unsupported if this kernel has none, io.
UniqueFd make_memory_directory(int like, std::uint64_t limit);

/// From now on `directory` holds `limit` bytes at most. Throws Error: io, also if it holds more already.
void set_memory_limit(int directory, std::uint64_t limit);

/// Whether nothing more fits into `directory`.
bool is_full(int directory) noexcept;

/// Remove all files of `directory`, and what is in them, also where one of them is open.
void empty_memory_directory(int directory) noexcept;

/// Names of all that is in `directory`. Throws Error: io.
std::vector<std::string> names_in(int directory);

} // namespace gpustasis
