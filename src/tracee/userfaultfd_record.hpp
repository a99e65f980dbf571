// SPDX-License-Identifier: Apache-2.0
/// Userfaultfds that are made in other processes, and what a maker that was killed has left of them.
///
/// A borrowed thread makes the descriptor, its maker takes a copy, and the thread closes it
/// (take_descriptor). A maker that is killed in between leaves it open there, unused, and CRIU dumps no
/// process that has one. So it is written down before, and the next that makes one in the process, or
/// dumps it, closes what is left.
#pragma once

#include "core/error.hpp"
#include "core/trusted_directory.hpp"
#include "core/unique_fd.hpp"
#include "tracee/injected_syscall.hpp"

#include <fcntl.h>
#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace gpustasis {

/// Flags of the userfaultfds that are made: what has others is not looked for.
constexpr std::uint64_t kUserfaultfdFlags = O_CLOEXEC | O_NONBLOCK;

/// A descriptor of a process: a userfaultfd with these flags which nobody has used yet.
struct UnusedUserfaultfd {
    int fd = -1;
    std::uint64_t inode = 0; ///< its own, as time `made` is, since Linux 5.12
    std::int64_t made = 0;   ///< in nanoseconds of the realtime clock

    bool operator==(const UnusedUserfaultfd&) const = default;
};

/// Throws Error: io.
std::vector<UnusedUserfaultfd> find_unused_userfaultfds(pid_t pid);

/// Those of process `pid` that are what was `closed` in another, which has forked it meanwhile.
/// Throws Error: io.
std::vector<UnusedUserfaultfd> find_inherited(pid_t pid,
                                              const std::vector<UnusedUserfaultfd>& closed);

/// The record of one process: a file in /run/gpustasis/userfaultfd, or /run/user/UID/gpustasis/userfaultfd,
/// named after the process. Its writer holds a lock on it for as long as it lives and has this object; a
/// record without a lock is a dead writer's. What that one has left is the one unused userfaultfd of the
/// process that was made in the seconds after the record was written.
///
/// Nobody needs it to make a descriptor: that it cannot be written or read is no failure. For one thread
/// at a time.
class UserfaultfdRecord {
public:
    /// Takes the lock, for which it waits a second at most. root also looks where the owner of the process
    /// writes. `missing`: make, if a descriptor is to be made. `base`: in place of /run or
    /// /run/user/UID; for tests.
    UserfaultfdRecord(pid_t pid, IfMissing missing, const std::string& base = {});
    UserfaultfdRecord(const UserfaultfdRecord&) = delete;
    UserfaultfdRecord& operator=(const UserfaultfdRecord&) = delete;
    /// A record that has begun and not ended stays if there may be something left.
    ~UserfaultfdRecord();

    /// What writers that are dead have left. With a thread of the process stopped: where it is the one that
    /// was borrowed, it has come through the call.
    std::vector<UnusedUserfaultfd> find_left() noexcept;

    /// Close `left` in the name of the thread of `calls`. Since it was found, the caller has seen that
    /// no other process traces a thread of this one: what is being made there looks the same.
    /// False: it is gone by now. Throws Error: io.
    bool close_left(const UnusedUserfaultfd& left, InjectedSyscalls& calls);

    /// Just before a descriptor is made, and again where that has to wait. Nothing is written over the record of
    /// what is left still, or may be. All threads of the process are stopped, or find_left() was asked before.
    void begin() noexcept;

    /// The process has the descriptor no longer, or never had.
    void end() noexcept;

    /// Why nobody would know of a descriptor that was left now, or cannot tell what is left.
    const std::optional<Error>& why_not() const noexcept { return why_not_; }

private:
    /// A directory of records, and in it that of the process.
    struct Place {
        UniqueFd directory;
        UniqueFd file;          ///< locked; none: there is none, or another process holds it
        std::int64_t written{}; ///< when
        bool is_record = false; ///< else the file is removed
        bool has_left = false;  ///< what was left is there, or one of several is that
    };

    Place look(const std::string& base, IfMissing missing, uid_t user);
    void judge(Place& place, const std::vector<UnusedUserfaultfd>& unused,
               std::vector<UnusedUserfaultfd>& left);

    pid_t pid_;
    std::string name_;
    Place own_;
    Place owners_;          ///< of the user whose the process is, if that is another
    bool held_ = false;     ///< another process holds one of them
    bool may_come_ = false; ///< a thread may still be on its way to the call of a dead writer
    bool looked_ = false;   ///< find_left() has
    bool begun_ = false;
    std::optional<Error> why_not_;
};

} // namespace gpustasis
