// SPDX-License-Identifier: Apache-2.0
/// One dump of a task at a time.
#pragma once

#include "core/unique_fd.hpp"
#include "dropped_memory/drop_record.hpp"

#include <string>

namespace gpustasis {

/// Held by criu from before it asks the driver about a task to the end of the dump. It is a lock on a
/// file of its own in /run/gpustasis/dumping (of a user other than root: /run/user/UID/gpustasis/dumping),
/// which says whose it is. The kernel takes the lock back when its holder dies; the next dump
/// removes the file then. A child of the holder must close the descriptor, as shed_criu() does.
class DumpLock {
public:
    /// `directory`: of the images, to be named to others. `base`: in place of /run; for tests.
    /// Throws Error: unsupported if another dump holds it, naming that one; io, bad_argument.
    DumpLock(const TaskIdentity& task, const std::string& directory, const std::string& base = {});
    DumpLock(DumpLock&&) noexcept = default;
    DumpLock& operator=(DumpLock&&) noexcept = delete;
    ~DumpLock();

private:
    UniqueFd directory_;
    std::string name_;
    UniqueFd file_;
};

} // namespace gpustasis
