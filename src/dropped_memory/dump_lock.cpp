// SPDX-License-Identifier: Apache-2.0
#include "dropped_memory/dump_lock.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/trusted_directory.hpp"

#include <dirent.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <memory>
#include <span>
#include <vector>

namespace gpustasis {
namespace {

constexpr std::uint64_t kMaxSize = 8192; // a path has at most 4096 bytes

struct CloseDir {
    void operator()(DIR* dir) const noexcept { ::closedir(dir); }
};

bool lock(int fd, int patience_ms) {
    return lock_file(fd, LOCK_EX, patience_ms, "a file for the dump of a task");
}

[[noreturn]] void refuse(int file, const TaskIdentity& task) {
    std::vector<std::byte> said = read_part(file, 0, std::min(file_size(file), kMaxSize));
    const std::string who(reinterpret_cast<const char*>(said.data()), said.size());
    throw Error(Errc::unsupported,
                "another is at work on the process with id " + std::to_string(task.inner_pid) +
                    " in its pid namespace: " + (who.empty() ? "it has just begun" : who) +
                    "; try again when that one has ended");
}

/// What dumps that were killed have left. Only for the holder of the directory's lock: nobody is
/// between making a file and locking it.
void remove_left(int directory, const std::string& but) {
    const std::unique_ptr<DIR, CloseDir> entries(
        ::fdopendir(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC)));
    if (!entries)
        throw io_error("cannot list the locks of dumps", errno);
    while (const dirent* entry = ::readdir(entries.get())) {
        if (entry->d_name == but || entry->d_type != DT_REG)
            continue;
        const UniqueFd file(
            ::openat(directory, entry->d_name, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
        if (file && lock(file.get(), 0))
            ::unlinkat(directory, entry->d_name, 0);
    }
}

} // namespace

DumpLock::DumpLock(const TaskIdentity& task, const std::string& who, const std::string& base)
    : holder_(::getpid()), name_(file_name(task)) {
    try {
        take(task, who, base);
    } catch (const Error& e) {
        const int error = e.error_number();
        if (error != ENOENT && error != EROFS && error != EACCES)
            throw;
        file_ = {};
        why_not_ = e;
    }
}

void DumpLock::take(const TaskIdentity& task, const std::string& who, const std::string& base) {
    const std::string place = base.empty() ? run_directory() : base;
    directory_ = open_trusted(place, {"gpustasis", "dumping"}, IfMissing::make);
    // One at a time, for a moment.
    const UniqueFd turn(::openat(directory_.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!turn)
        throw io_error("cannot open the directory of locks", errno);
    if (!lock(turn.get(), kLockPatienceMs))
        throw Error(Errc::unsupported,
                    "another process has held the lock of " + place + "/gpustasis/dumping for " +
                        std::to_string(kLockPatienceMs / 1000) +
                        " s: find it with fuser, see whether it is stopped, and try again");
    LockedFile file = open_locked(directory_.get(), name_, IfMissing::make, 0);
    if (!file.locked)
        refuse(file.fd.get(), task);
    file_ = std::move(file.fd);
    if (::ftruncate(file_.get(), 0) != 0)
        throw io_error("cannot empty the lock " + name_, errno);
    write_at(file_.get(), 0, std::as_bytes(std::span(who)));
    remove_left(directory_.get(), name_);
}

DumpLock::~DumpLock() {
    if (file_ && ::getpid() == holder_) // before the lock goes with its descriptor
        ::unlinkat(directory_.get(), name_.c_str(), 0);
}

} // namespace gpustasis
