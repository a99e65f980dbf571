// SPDX-License-Identifier: Apache-2.0
// open_shared_files(): the kernel's say on what the mappings of a tree promise.
#include "core/error.hpp"
#include "cuda_plugin/shared_memory.hpp"
#include "tracee/proc.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <exception>
#include <filesystem>
#include <optional>
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

SharedFile open_file(const std::vector<SharingTask>& tasks, std::uint64_t inode, dev_t device) {
    SharedFile file;
    struct stat first {};
    for (const SharingTask& task : tasks)
        for (const Mapping& mapping : task.mappings) {
            if (mapping.inode != inode || !maps_shared_memory(mapping))
                continue;
            UniqueFd fd = open_mapped(task.pid, mapping);
            struct stat status {};
            if (::fstat(fd.get(), &status) != 0)
                throw io_error("cannot examine it", errno);
            if (status.st_dev != device || status.st_ino != inode)
                throw Error(Errc::unsupported, "it is not memory of the kernel's own");
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
    file.data = find_data(file.fd.get());
    return file;
}

/// What processes outside of the tree use of `files`.
class Outside {
public:
    Outside(const std::vector<SharingTask>& tasks, dev_t device,
            const std::map<std::uint64_t, SharedFile>& files)
        : device_(device), files_(files) {
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

    /// By inode number: the process.
    const std::map<std::uint64_t, pid_t>& users() const noexcept { return users_; }

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
                note(mapping.inode, pid);
    }

    void look_at_descriptors(pid_t pid) {
        const std::string directory = "/proc/" + std::to_string(pid) + "/fd";
        for (const auto& link : std::filesystem::directory_iterator(directory)) {
            std::error_code closed;
            const std::filesystem::path target = std::filesystem::read_symlink(link, closed);
            struct stat status {};
            if (!closed && target.native().starts_with("/memfd:") &&
                ::stat(link.path().c_str(), &status) == 0 && status.st_dev == device_)
                note(status.st_ino, pid);
        }
    }

    void note(std::uint64_t inode, pid_t pid) {
        if (files_.contains(inode))
            users_.emplace(inode, pid);
    }

    dev_t device_;
    const std::map<std::uint64_t, SharedFile>& files_;
    std::map<std::uint64_t, pid_t> users_;
};

} // namespace

std::map<std::uint64_t, SharedFile>
open_shared_files(const std::vector<SharingTask>& tasks,
                  const std::function<void(const std::string& why_not)>& left) {
    std::map<std::uint64_t, SharedFile> files;
    const std::vector<std::uint64_t> candidates = find_shared_candidates(tasks);
    if (candidates.empty())
        return files;
    const auto device = device_of_shared_memory();
    if (!device) {
        left(std::string("no memfd can be made: ") + std::strerror(errno));
        return files;
    }
    const auto leave = [&](std::uint64_t inode, const std::string& why) {
        left("inode " + std::to_string(inode) + ": " + why);
        files.erase(inode);
    };
    for (const std::uint64_t inode : candidates) {
        try {
            files.emplace(inode, open_file(tasks, inode, *device));
        } catch (const Error& e) {
            leave(inode, e.what());
        }
        if (files.size() > kMaxFiles) {
            const auto smallest = std::ranges::min_element(
                files, {}, [](const auto& file) { return file.second.size; });
            leave(smallest->first, "there are many, and it is small");
        }
    }
    if (files.empty())
        return files;
    try {
        const Outside outside(tasks, *device, files);
        for (const auto& [inode, pid] : outside.users())
            leave(inode, "process " + std::to_string(pid) + ", outside of the tree, uses it");
    } catch (const std::exception& e) { // of the library, that /proc cannot be listed
        left(std::string("what other processes use cannot be found out: ") + e.what());
        files.clear();
    }
    return files;
}

} // namespace gpustasis
