// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/memory_directory.hpp"

#include "core/error.hpp"
#include "core/pack_index.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <system_error>

// <linux/mount.h> and glibc's <sys/mount.h> cannot be used together everywhere.
#ifndef FSOPEN_CLOEXEC
#define FSOPEN_CLOEXEC 0x00000001
#endif
#ifndef FSMOUNT_CLOEXEC
#define FSMOUNT_CLOEXEC 0x00000001
#endif
#ifndef FSPICK_CLOEXEC
#define FSPICK_CLOEXEC 0x00000001
#endif

namespace gpustasis {
namespace {

constexpr unsigned kSetFlag = 0;                  // FSCONFIG_SET_FLAG
constexpr unsigned kSetString = 1;                // FSCONFIG_SET_STRING
constexpr unsigned kCreate = 6;                   // FSCONFIG_CMD_CREATE
constexpr unsigned kReconfigure = 7;              // FSCONFIG_CMD_RECONFIGURE
constexpr unsigned kEmptyPath = 0x8;              // FSPICK_EMPTY_PATH
constexpr unsigned kAttributes = 0x2 | 0x4 | 0x8; // MOUNT_ATTR_NOSUID, _NODEV, _NOEXEC

// Zero would mean that there is no limit.
constexpr std::uint64_t kLeast = 4096;
// Of memory for each file: what the kernel holds for it, about 1 KiB, is not counted against the size.
constexpr std::uint64_t kForFile = 16U << 10;
constexpr std::uint64_t kOwnFiles = 64; // the directory, the manifest, and what is in part

[[noreturn]] void refuse(int error_number) {
    if (error_number == ENOSYS)
        throw Error(Errc::unsupported,
                    "this kernel cannot make a directory in memory (fsopen, since Linux 5.2)");
    throw io_error("cannot make a directory in memory", error_number);
}

void configure(int context, unsigned command, const char* key, const char* value) {
    if (::syscall(SYS_fsconfig, context, command, key, value, 0) != 0)
        refuse(errno);
}

// Also of one that is there: the kernel takes what is not said again for a change.
void set_options(int context, std::uint64_t limit) {
    // Since Linux 6.4. Where it is not known, what is in memory may go to the machine's swap, as the tasks'
    // own memory may.
    if (::syscall(SYS_fsconfig, context, kSetFlag, "noswap", nullptr, 0) != 0 && errno != EINVAL)
        refuse(errno);
    const std::uint64_t size = std::max(limit, kLeast);
    const std::uint64_t files = std::min(size / kForFile, format::kMaxPackedFiles) + kOwnFiles;
    configure(context, kSetString, "size", std::to_string(size).c_str());
    configure(context, kSetString, "nr_inodes", std::to_string(files).c_str());
}

} // namespace

UniqueFd make_memory_directory(int like, std::uint64_t limit) {
    struct stat status {};
    if (::fstat(like, &status) != 0)
        throw io_error("cannot examine the image directory", errno);
    char mode[16];
    std::snprintf(mode, sizeof mode, "%o", status.st_mode & 07777U);
    const UniqueFd context(static_cast<int>(::syscall(SYS_fsopen, "tmpfs", FSOPEN_CLOEXEC)));
    if (!context)
        refuse(errno);
    configure(context.get(), kSetString, "mode", mode);
    set_options(context.get(), limit);
    configure(context.get(), kCreate, nullptr, nullptr);
    const UniqueFd mount(
        static_cast<int>(::syscall(SYS_fsmount, context.get(), FSMOUNT_CLOEXEC, kAttributes)));
    if (!mount)
        refuse(errno);
    UniqueFd root(::openat(mount.get(), ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!root)
        refuse(errno);
    return root;
}

void set_memory_limit(int directory, std::uint64_t limit) {
    const UniqueFd context(
        static_cast<int>(::syscall(SYS_fspick, directory, "", kEmptyPath | FSPICK_CLOEXEC)));
    if (!context)
        throw io_error("cannot change how much a directory in memory holds", errno);
    try {
        set_options(context.get(), limit);
        configure(context.get(), kReconfigure, nullptr, nullptr);
    } catch (const Error& e) {
        throw Error(e, "cannot have a directory in memory hold " + std::to_string(limit >> 20) +
                           " MiB at most: " + e.what());
    }
}

bool is_full(int directory) noexcept {
    struct statvfs status {};
    return ::fstatvfs(directory, &status) == 0 && (status.f_bfree == 0 || status.f_ffree == 0);
}

void empty_memory_directory(int directory) noexcept {
    try {
        for (const std::string& name : names_in(directory)) {
            const UniqueFd cut(
                ::openat(directory, name.c_str(), O_WRONLY | O_TRUNC | O_NOFOLLOW | O_CLOEXEC));
            ::unlinkat(directory, name.c_str(), 0);
        }
    } catch (const std::exception&) { // NOLINT(bugprone-empty-catch): the end of criu frees it
    }
}

std::vector<std::string> names_in(int directory) {
    std::vector<std::string> names;
    try {
        for (const auto& entry :
             std::filesystem::directory_iterator("/proc/self/fd/" + std::to_string(directory)))
            names.push_back(entry.path().filename().string());
    } catch (const std::system_error& e) {
        throw Error(Errc::io, e.what());
    }
    return names;
}

} // namespace gpustasis
