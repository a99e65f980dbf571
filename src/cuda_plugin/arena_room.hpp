// SPDX-License-Identifier: Apache-2.0
/// How much an arena may take: its own limit, that of its file system, and what the host and this process's control
/// groups have left. A dump that took more would have the kernel kill a job.
#pragma once

#include "cuda_plugin/config.hpp"

#include <sys/types.h>

#include <cstdint>
#include <mutex>
#include <string>

namespace gpustasis {

/// An empty, sparse file in the directory of a checkpoint that is being made, as large as its dump is to become at most:
/// other dumps take it for taken.
inline constexpr const char* kArenaReserved = "reserved";

/// Bytes that an arena takes now.
struct ArenaUsage {
    std::uint64_t kept = 0; ///< of checkpoints, what is reserved for those under way among them
    std::uint64_t pool = 0; ///< of files that are written into again
    std::uint64_t promised =
        0; ///< of `kept`, bytes that are reserved and not written yet: the host still has them
};

/// What a dump is to store, at most, and what else it takes of the host's memory meanwhile.
struct ArenaNeed {
    std::uint64_t stored = 0; ///< bytes
    std::uint64_t staged = 0; ///< bytes that the driver stages in the tasks at once
    pid_t root = 0;           ///< of the tree: staging counts in its control groups
};

/// Bytes of CPU memory of task `pid` that a dump may store: what is in memory now. 0: it has ended.
std::uint64_t cpu_memory_of(pid_t pid);

/// Bytes that the arena may hold. Throws Error: io.
std::uint64_t limit_of(const ArenaConfig& config);

/// Of the open directory `arena`; `except`: the name of a checkpoint that does not count. Throws Error: io.
ArenaUsage usage_of(int arena, const std::string& except = "");

/// Bytes that a dump may store in an arena, in files of the pool or beside them, so that this process's levels
/// (memory_levels) hold. Throws Error: io.
std::uint64_t room_for(int arena, const ArenaConfig& config, const ArenaUsage& usage,
                       const ArenaNeed& need);

class ArenaRoom {
public:
    /// `arena` stays the caller's, and open; `own`: the name of the dump's own directory in it.
    ArenaRoom(const ArenaConfig& config, int arena, std::string own)
        : config_(config), arena_(arena), own_(std::move(own)) {}

    /// Before any task is locked: see that what `need` says fits, and reserve it. Where it does not, and `may_wait`,
    /// wait for a drain as config.waits says. Throws Error: unsupported, with the numbers, if it does not fit; io.
    void reserve(const ArenaNeed& need, bool may_wait);

    /// Before the first file is written: what reserve() has not looked at is looked at now, and nothing is waited for.
    /// Throws as reserve().
    void prepare();

    /// `bytes` more are about to be written; files of the pool are removed for that if it must be: returns how many bytes
    /// these had. By several threads at once. Throws Error: io, as a disk that is full, if there is no room.
    std::uint64_t take(std::uint64_t bytes);

    /// Take `bytes` for a copy of what is in a file of `returned` bytes, which goes back to the pool. False: there is no room
    /// without taking more of the pool, or the pool would be larger than it may be. By several threads at once. Throws
    /// Error: io.
    bool try_take(std::uint64_t bytes, std::uint64_t returned);

    /// `bytes` that were taken are about to be written, and `unwritten` more later: the host's memory is looked at again, now
    /// and then. By several threads at once. Throws as take().
    void use(std::uint64_t bytes, std::uint64_t unwritten);

    /// A process that was forked has taken `bytes` from its own copy of this, less what it has given to it.
    void spent(std::int64_t bytes) noexcept;

    /// `bytes` were given back. By several threads at once.
    void give(std::uint64_t bytes) noexcept;

private:
    std::string why_not(const ArenaNeed& need);
    bool is_left(std::uint64_t bytes);

    const ArenaConfig& config_;
    int arena_;
    std::string own_;
    std::uint64_t seen_ =
        0; ///< bytes that memory had left when it was last looked at, less what was taken since
    std::uint64_t used_ = 0; ///< of what was taken earlier, since memory was looked at for that
    std::mutex preparing_;
    std::mutex mutex_;
    bool is_known_ = false;
    std::int64_t free_ =
        0; ///< bytes that may be added; less than 0: so much of the pool is promised to others
};

} // namespace gpustasis
