// SPDX-License-Identifier: Apache-2.0
/// The criu that has started this program.
#pragma once

#include <sys/types.h>

#include <string>

namespace gpustasis {

/// The text of a file of /proc. Throws Error: io.
std::string read_whole(const std::string& path);

/// Add a line to the log of process `criu`, if one of its descriptors leads to a log of its. Whoever asks the
/// engine why there is no checkpoint is shown CRIU's log.
void tell_log(pid_t criu, const std::string& text) noexcept;

} // namespace gpustasis
