// SPDX-License-Identifier: Apache-2.0
/// One dump or recovery of a task at a time.
#pragma once

#include "core/error.hpp"
#include "core/unique_fd.hpp"
#include "dropped_memory/drop_record.hpp"

#include <sys/types.h>

#include <optional>
#include <string>

namespace gpustasis {

/// Held by criu from before it asks the driver about a task to the end of the dump, and by `gpustasis
/// recover` while it is at work: a task that a dump has locked looks like one that was left so, and a
/// recovery would have it run on under that dump. It is a lock on a file of its own in
/// /run/gpustasis/dumping (of a user other than root: /run/user/UID/gpustasis/dumping), which says
/// whose it is. The kernel takes the lock back when its holder dies; the next dump
/// removes the file then. A child of the holder must close the descriptor, as shed_criu() does; where it ends by
/// exit(), as those do that criu has for namespaces, the file stays.
///
/// Where that directory can be neither made nor written to, because it or the one above it is
/// missing, read-only or closed to this user, nothing is held, and why_not() says so: a dump that
/// takes no memory out of the task can do without.
class DumpLock {
public:
    /// `who`: this process and what it does, to be named to others. `base`: in place of /run; for tests.
    /// Throws Error: unsupported if another holds it, naming that one; io, bad_argument.
    DumpLock(const TaskIdentity& task, const std::string& who, const std::string& base = {});
    DumpLock(DumpLock&&) noexcept = default;
    DumpLock& operator=(DumpLock&&) noexcept = delete;
    ~DumpLock();

    /// What kept the lock from being taken; none: it is held.
    const std::optional<Error>& why_not() const noexcept { return why_not_; }

private:
    void take(const TaskIdentity& task, const std::string& who, const std::string& base);

    pid_t holder_; ///< process id
    UniqueFd directory_;
    std::string name_;
    UniqueFd file_;
    std::optional<Error> why_not_;
};

} // namespace gpustasis
