// SPDX-License-Identifier: Apache-2.0
/// The setting vm.unprivileged_userfaultfd, raised for a moment.
#pragma once

#include "core/file.hpp"
#include "core/unique_fd.hpp"

#include <string>

namespace gpustasis {

/// Sets vm.unprivileged_userfaultfd to 1 for as long as it lives: one process at a time, the others
/// wait, within limits. A file in /run/gpustasis says so meanwhile; should this process be killed,
/// lower_userfaultfd_setting() of another one sets it back. Where it is 1 already, and none of ours has
/// left it so, it stays as it is.
class UserfaultfdAllowed {
public:
    /// Throws Error: unsupported if the setting cannot be changed here, or if another process has held
    /// it for `patience_ms`; io, bad_argument.
    explicit UserfaultfdAllowed(int patience_ms = kLockPatienceMs);
    UserfaultfdAllowed(const UserfaultfdAllowed&) = delete;
    UserfaultfdAllowed& operator=(const UserfaultfdAllowed&) = delete;
    ~UserfaultfdAllowed();

private:
    UniqueFd mark_; ///< none: there was nothing to raise
};

/// Set it back to 0 if a process was killed while it was raised; nothing else. True if that was so.
/// Waits for nobody. Throws Error: io, bad_argument.
bool lower_userfaultfd_setting();

/// Whether a process was killed while it was raised, so that it still is. Throws as above.
bool is_userfaultfd_setting_left();

} // namespace gpustasis
