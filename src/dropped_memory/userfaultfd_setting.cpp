// SPDX-License-Identifier: Apache-2.0
#include "dropped_memory/userfaultfd_setting.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/trusted_directory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

namespace gpustasis {
namespace {

constexpr const char* kSetting = "/proc/sys/vm/unprivileged_userfaultfd";
// Its lock is held while the setting is raised, and it is not empty for that time.
constexpr const char* kMark = "userfaultfd-raised";

UniqueFd open_mark(bool make) {
    const UniqueFd dir =
        open_trusted("/run", {"gpustasis"}, make ? IfMissing::make : IfMissing::nothing);
    if (!dir)
        return UniqueFd();
    UniqueFd mark(::openat(dir.get(), kMark,
                           O_RDWR | (make ? O_CREAT : 0) | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC,
                           S_IRUSR | S_IWUSR));
    if (!mark && (make || errno != ENOENT))
        throw io_error(std::string("cannot open /run/gpustasis/") + kMark, errno);
    if (mark)
        require_trusted(mark.get(), std::string("/run/gpustasis/") + kMark);
    return mark;
}

bool lock(int fd, int patience_ms = 0) {
    return lock_file(fd, LOCK_EX, patience_ms, std::string("/run/gpustasis/") + kMark);
}

bool is_raised() {
    const UniqueFd file(::open(kSetting, O_RDONLY | O_CLOEXEC));
    char value = 0;
    if (!file || ::read(file.get(), &value, 1) != 1)
        throw Error(Errc::unsupported,
                    io_error(std::string("cannot read ") + kSetting, errno).what());
    return value != '0';
}

bool set(char value) noexcept {
    const UniqueFd file(::open(kSetting, O_WRONLY | O_CLOEXEC));
    return file && ::write(file.get(), &value, 1) == 1;
}

void lower(int mark) noexcept {
    if (set('0'))
        static_cast<void>(::ftruncate(mark, 0) == 0);
}

} // namespace

UserfaultfdAllowed::UserfaultfdAllowed(int patience_ms) : mark_(open_mark(true)) {
    if (!lock(mark_.get(), patience_ms))
        throw Error(Errc::unsupported, std::string("another process has held /run/gpustasis/") +
                                           kMark + " for " + std::to_string(patience_ms / 1000) +
                                           " s: find it with fuser, and see whether it is stopped");
    // What is in the file already was left by a process that was killed: the setting is 0 by right.
    if (file_size(mark_.get()) == 0 && is_raised()) {
        mark_.reset(); // by the administrator
        return;
    }
    if (::pwrite(mark_.get(), "1\n", 2, 0) != 2)
        throw io_error(std::string("cannot write /run/gpustasis/") + kMark, errno);
    if (!set('1')) {
        const int error = errno;
        static_cast<void>(::ftruncate(mark_.get(), 0) == 0);
        throw Error(Errc::unsupported,
                    io_error(std::string("cannot write ") + kSetting, error).what());
    }
}

UserfaultfdAllowed::~UserfaultfdAllowed() {
    if (mark_)
        lower(mark_.get());
}

bool is_userfaultfd_setting_left() {
    const UniqueFd mark = open_mark(false);
    return mark && lock(mark.get()) && file_size(mark.get()) != 0;
}

bool lower_userfaultfd_setting() {
    const UniqueFd mark = open_mark(false);
    if (!mark || !lock(mark.get()) || file_size(mark.get()) == 0)
        return false;
    lower(mark.get());
    return true;
}

} // namespace gpustasis
