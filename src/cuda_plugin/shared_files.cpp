// SPDX-License-Identifier: Apache-2.0
// open_shared_files(): the kernel's say on what the mappings of a tree promise.
#include "core/error.hpp"
#include "cuda_plugin/shared_memory.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>
#include <set>
#include <sstream>
#include <string_view>
#include <system_error>
#include <utility>

namespace gpustasis {
namespace {

// linux/fcntl.h
constexpr int kGetSeals = 1024 + 10;
constexpr int kSealWrite = 0x8;
constexpr int kSealFutureWrite = 0x10;
/// Each is a descriptor of the criu process until its dump is over.
constexpr std::size_t kMaxFiles = 256;

constexpr std::string_view kShmemLine = "\nRssShmem:";
constexpr std::string_view kRemoved = " (deleted)";
constexpr std::string_view kInodeLine = "\nino:\t";
// Of the kernel's own, but CRIU restores it by its key.
constexpr std::string_view kSystemV = "/SYSV";

/// Of the mount of the kernel's own that has all shared memory without a path.
std::optional<dev_t> device_of_shared_memory() {
    const UniqueFd probe(::memfd_create("gpustasis", MFD_CLOEXEC));
    struct stat status {};
    if (!probe || ::fstat(probe.get(), &status) != 0)
        return std::nullopt;
    return status.st_dev;
}

bool is_same(const struct stat& one, const struct stat& other) noexcept {
    return one.st_dev == other.st_dev && one.st_ino == other.st_ino &&
           one.st_size == other.st_size && one.st_ctim.tv_sec == other.st_ctim.tv_sec &&
           one.st_ctim.tv_nsec == other.st_ctim.tv_nsec;
}

UniqueFd open_mapped(pid_t pid, const Mapping& mapping) {
    char name[64];
    std::snprintf(name, sizeof name, "/map_files/%llx-%llx",
                  static_cast<unsigned long long>(mapping.start),
                  static_cast<unsigned long long>(mapping.end));
    const std::string path = "/proc/" + std::to_string(pid) + name;
    UniqueFd fd(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
    if (!fd)
        throw io_error("cannot open " + path, errno);
    return fd;
}

std::vector<AddressRange> find_data(int fd) {
    std::vector<AddressRange> found;
    for (off_t at = 0;;) {
        const off_t data = ::lseek(fd, at, SEEK_DATA);
        if (data < 0 && errno == ENXIO)
            return found;
        at = data < 0 ? data : ::lseek(fd, data, SEEK_HOLE);
        if (at < 0)
            throw io_error("cannot find its data", errno);
        found.push_back({static_cast<std::uint64_t>(data), static_cast<std::uint64_t>(at)});
    }
}

/// Devices of the tmpfs that task `pid` has mounted.
std::set<dev_t> tmpfs_of(pid_t pid) {
    std::istringstream lines(proc::read_file("/proc/" + std::to_string(pid) + "/mountinfo"));
    std::set<dev_t> found;
    for (std::string line; std::getline(lines, line);) {
        unsigned major_number = 0;
        unsigned minor_number = 0;
        if (line.find(" - tmpfs ") != std::string::npos &&
            std::sscanf(line.c_str(), "%*u %*u %u:%u ", &major_number, &minor_number) == 2)
            found.insert(makedev(major_number, minor_number));
    }
    return found;
}

// Nothing on another file system is opened: it may be one whose server is frozen with the tree.
void require_memory(pid_t pid, const Mapping& mapping, dev_t own) {
    if (mapping.device == own) {
        if (mapping.name.starts_with(kSystemV))
            throw Error(Errc::unsupported, "it is System V memory");
    } else if (!tmpfs_of(pid).contains(mapping.device)) {
        throw Error(Errc::unsupported, mapping.name + " is on no tmpfs that process " +
                                           std::to_string(pid) + " has mounted");
    }
}

SharedFile open_file(const std::vector<SharingTask>& tasks, const SharedFileId& id, dev_t own) {
    SharedFile file;
    struct stat first {};
    for (const SharingTask& task : tasks)
        for (const Mapping& mapping : task.mappings) {
            if (file_of(mapping) != id || !maps_shared_memory(mapping))
                continue;
            require_memory(task.pid, mapping, own);
            UniqueFd fd = open_mapped(task.pid, mapping);
            struct stat status {};
            if (::fstat(fd.get(), &status) != 0)
                throw io_error("cannot examine it", errno);
            if (status.st_dev != id.device || status.st_ino != id.inode)
                throw Error(Errc::unsupported, "it is another file than /proc says");
            if (status.st_dev != own && status.st_nlink != 0)
                throw Error(Errc::unsupported, mapping.name + " has another name still");
            if (file.fd && !is_same(status, first))
                throw Error(Errc::unsupported, "its mappings are of several files");
            if (!file.fd) {
                file.fd = std::move(fd);
                first = status;
            }
        }
    const int seals = ::fcntl(file.fd.get(), kGetSeals);
    if (seals < 0)
        throw io_error("cannot find its seals", errno);
    if ((seals & (kSealWrite | kSealFutureWrite)) != 0)
        throw Error(Errc::unsupported, "it is sealed against writing");
    file.size = static_cast<std::uint64_t>(first.st_size);
    file.block = std::max(file.block, static_cast<std::uint64_t>(first.st_blksize));
    file.data = find_data(file.fd.get());
    return file;
}

/// What processes outside of the tree use of `files`.
class Outside {
public:
    Outside(const std::vector<SharingTask>& tasks, const std::map<SharedFileId, SharedFile>& files)
        : files_(files) {
        for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
            const std::string name = entry.path().filename();
            pid_t pid = 0;
            const auto [end, bad] = std::from_chars(name.data(), name.data() + name.size(), pid);
            if (bad != std::errc{} || end != name.data() + name.size() || pid == ::getpid() ||
                std::ranges::find(tasks, pid, &SharingTask::pid) != tasks.end())
                continue;
            look_at(pid);
        }
    }

    const std::map<SharedFileId, pid_t>& users() const noexcept { return users_; }

private:
    // One that ends meanwhile uses nothing any more. One that has more rights than criu keeps what it uses to
    // itself: that cannot be told from here, and CRIU does not ask.
    void look_at(pid_t pid) {
        const auto is_expected = [](int why) {
            return why == ENOENT || why == ESRCH || why == EACCES || why == EPERM;
        };
        try {
            look_at_mappings(pid);
            look_at_descriptors(pid);
        } catch (const Error& e) {
            if (!is_expected(e.error_number()))
                throw;
        } catch (const std::filesystem::filesystem_error& e) {
            if (!is_expected(e.code().value()))
                throw Error(Errc::io, e.what());
        }
    }

    // To read the mappings takes a lock of the process, and most have touched no shared memory.
    void look_at_mappings(pid_t pid) {
        const std::string status = proc::read_file("/proc/" + std::to_string(pid) + "/status");
        const std::size_t line = status.find(kShmemLine);
        if (line == std::string::npos) // a thread of the kernel
            return;
        const std::size_t digits = status.find_first_of("0123456789", line);
        if (digits == std::string::npos || status.compare(digits, 2, "0 ") == 0)
            return;
        for (const Mapping& mapping : read_maps(pid))
            if (maps_shared_memory(mapping))
                note(file_of(mapping), pid);
    }

    void look_at_descriptors(pid_t pid) {
        const std::string directory = "/proc/" + std::to_string(pid) + "/fd";
        for (const auto& link : std::filesystem::directory_iterator(directory)) {
            std::error_code closed;
            const std::filesystem::path target = std::filesystem::read_symlink(link, closed);
            struct stat status {};
            if (!closed && target.native().ends_with(kRemoved) && has_known_inode(pid, link) &&
                ::stat(link.path().c_str(), &status) == 0)
                note({.device = status.st_dev, .inode = status.st_ino}, pid);
        }
    }

    // Before the file itself is asked: whoever serves it may never answer.
    bool has_known_inode(pid_t pid, const std::filesystem::path& link) const {
        std::string text;
        try {
            text = proc::read_file("/proc/" + std::to_string(pid) + "/fdinfo/" +
                                   link.filename().string());
        } catch (const Error& e) {
            if (e.error_number() == ENOENT) // closed meanwhile
                return false;
            throw;
        }
        const std::size_t line = text.find(kInodeLine);
        if (line == std::string::npos)
            throw Error(Errc::unsupported, "this kernel tells no inode in /proc/PID/fdinfo");
        std::uint64_t inode = 0;
        const char* digits = text.data() + line + kInodeLine.size();
        std::from_chars(digits, text.data() + text.size(), inode);
        return std::ranges::any_of(files_,
                                   [&](const auto& file) { return file.first.inode == inode; });
    }

    void note(const SharedFileId& file, pid_t pid) {
        if (files_.contains(file))
            users_.emplace(file, pid);
    }

    const std::map<SharedFileId, SharedFile>& files_;
    std::map<SharedFileId, pid_t> users_;
};

} // namespace

std::map<SharedFileId, SharedFile>
open_shared_files(const std::vector<SharingTask>& tasks,
                  const std::function<void(const std::string& why_not)>& left) {
    std::map<SharedFileId, SharedFile> files;
    const std::vector<SharedFileId> candidates = find_shared_candidates(tasks);
    if (candidates.empty())
        return files;
    const auto device = device_of_shared_memory();
    if (!device) {
        left(std::string("no memfd can be made: ") + std::strerror(errno));
        return files;
    }
    const auto leave = [&](const SharedFileId& file, const std::string& why) {
        left("inode " + std::to_string(file.inode) + ": " + why);
        files.erase(file);
    };
    for (const SharedFileId& id : candidates) {
        try {
            files.emplace(id, open_file(tasks, id, *device));
        } catch (const Error& e) {
            leave(id, e.what());
        }
        if (files.size() > kMaxFiles) {
            const auto smallest = std::ranges::min_element(
                files, {}, [](const auto& file) { return file.second.size; });
            leave(SharedFileId(smallest->first), "there are many, and it is small");
        }
    }
    if (files.empty())
        return files;
    try {
        const Outside outside(tasks, files);
        for (const auto& [file, pid] : outside.users())
            leave(file, "process " + std::to_string(pid) + ", outside of the tree, uses it");
    } catch (const std::exception& e) { // of the library, that /proc cannot be listed
        left(std::string("what other processes use cannot be found out: ") + e.what());
        files.clear();
    }
    return files;
}

} // namespace gpustasis
