// SPDX-License-Identifier: Apache-2.0
/// Directories of ours that criu, being root, believes: nobody else may have written there.
#pragma once

#include "core/unique_fd.hpp"

#include <string>
#include <vector>

namespace gpustasis {

enum class IfMissing { nothing, make };

/// The directory `base`/`parts[0]`/`parts[1]`…; `base` is the system's. No part may be a link, each
/// must belong to root or to the user criu runs as, and none be writable for others. What is
/// missing is made with mode 0700, or the result is no descriptor. Throws Error: io; bad_argument
/// naming the directory that could be somebody else's.
UniqueFd open_trusted(const std::string& base, const std::vector<std::string>& parts,
                      IfMissing missing);

/// What `fd` is must be as said above. Throws Error: io, bad_argument naming `path`.
void require_trusted(int fd, const std::string& path);

} // namespace gpustasis
