// SPDX-License-Identifier: Apache-2.0
/// Which pages of a process were written since a mark.
#pragma once

#include "dirty_tracker/dirty_pages.hpp"

#include <sys/types.h>

#include <memory>
#include <mutex>
#include <optional>
#include <string>

namespace gpustasis {

class DirtyMethod;

/// Sees writes by the process itself, the kernel in its name included; not those by a device, nor,
/// in shared memory, those by another process. Before the first mark everything counts as written;
/// so do mappings that are new since the mark, a huge page that came to be since then, whole, and
/// a page of shared memory that the process has touched for the first time, if only to read it.
/// A page that was given back (munmap, MADV_DONTNEED) is not found.
/// Calls from several threads take turns.
class DirtyTracker {
public:
    /// nullopt: write_protect if it works here, else soft_dirty. Needs ptrace access to `pid`. With
    /// write_protect also closes what a tracker that was killed has left there (UserfaultfdRecord).
    /// Throws Error: unsupported, saying why, if the backend cannot work here; gone; io.
    DirtyTracker(pid_t pid, std::optional<DirtyBackend> backend);
    DirtyTracker(const DirtyTracker&) = delete;
    DirtyTracker& operator=(const DirtyTracker&) = delete;
    /// The process is as it was before.
    ~DirtyTracker();

    pid_t pid() const noexcept { return pid_; }
    DirtyBackend backend() const noexcept { return backend_; }

    /// From now on, what was written until now does not count. Throws Error: gone, io;
    /// bad_argument after close().
    void mark();

    /// What was written since the last mark. `remark`: mark in the same step. With write_protect
    /// no write is lost between the two; with soft_dirty those of that moment are.
    /// Throws as mark().
    DirtyPages scan(bool remark);

    /// Stop tracking; the process keeps nothing of it. Can be called again.
    void close() noexcept;

private:
    DirtyMethod& method();

    pid_t pid_;
    DirtyBackend backend_ = DirtyBackend::write_protect;
    std::mutex mutex_;
    std::unique_ptr<DirtyMethod> method_;
};

/// Empty if `backend` works on this machine, as far as can be said without a process to track,
/// else why it does not. Tried out on a page of this process, not read from a configuration.
std::string why_not(DirtyBackend backend);

} // namespace gpustasis
