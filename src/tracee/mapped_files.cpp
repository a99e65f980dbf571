// SPDX-License-Identifier: Apache-2.0
#include "tracee/mapped_files.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/file_identity.hpp"
#include "tracee/proc.hpp"
#include "tracee/task_maps.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstdio>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

constexpr std::string_view kDeleted = " (deleted)";
// One path may be seen in several mount namespaces.
constexpr std::size_t kMaxSeen = std::size_t{4} * format::kMaxRequiredFiles;
constexpr std::size_t kMaxSeenSize = std::size_t{4} * format::kMaxRequiredPaths;

bool is_executable(const Mapping& mapping) noexcept {
    return (mapping.protection & PROT_EXEC) != 0;
}

/// The mount namespace of a task, "mnt:[4026531841]". Throws Error: io.
std::string mount_namespace(const std::string& task) {
    const std::string link = "/proc/" + task + "/ns/mnt";
    std::array<char, 64> text{};
    const ssize_t size = ::readlink(link.c_str(), text.data(), text.size());
    if (size < 0)
        throw io_error("cannot read the link " + link, errno);
    return {text.data(), static_cast<std::size_t>(size)};
}

/// The kernel's own link to the file behind a mapping: right whatever its path leads to by now.
std::string link_of(pid_t pid, const Mapping& mapping) {
    std::array<char, 96> text{};
    const int size = std::snprintf(text.data(), text.size(), "/proc/%d/map_files/%llx-%llx", pid,
                                   static_cast<unsigned long long>(mapping.start),
                                   static_cast<unsigned long long>(mapping.end));
    return {text.data(), static_cast<std::size_t>(size)};
}

/// Unescaped, unlike in /proc/PID/maps. Throws Error: io.
std::string path_behind(const std::string& link) {
    std::array<char, PATH_MAX> path;
    const ssize_t size = ::readlink(link.c_str(), path.data(), path.size());
    if (size < 0)
        throw io_error("cannot read the link " + link, errno);
    return {path.data(), static_cast<std::size_t>(size)};
}

/// CRIU keeps such a file's content, or makes a name for it: nothing needs to be at the path.
bool has_no_name(std::string_view path) {
    const std::string_view name = path.substr(path.rfind('/') + 1);
    return path.ends_with(kDeleted) || name.starts_with(".nfs"); // what NFS makes of a removed file
}

/// One mapping of each file, an executable one if there is one, by name and inode.
std::vector<Mapping> file_mappings(pid_t pid) {
    std::vector<Mapping> found = read_maps(pid);
    std::erase_if(found, [](const Mapping& mapping) {
        return mapping.inode == 0 || !mapping.name.starts_with('/') || has_no_name(mapping.name);
    });
    const auto key = [](const Mapping& mapping) { return std::tie(mapping.name, mapping.inode); };
    std::ranges::sort(found, [&](const Mapping& one, const Mapping& other) {
        return std::tuple(key(one), !is_executable(one)) <
               std::tuple(key(other), !is_executable(other));
    });
    const auto repeated = std::ranges::unique(found, {}, key);
    found.erase(repeated.begin(), repeated.end());
    return found;
}

} // namespace

MappedFiles::MappedFiles(pid_t root, const Requirements* expected, std::chrono::milliseconds time)
    : expected_(expected), ours_(mount_namespace("self")),
      roots_(mount_namespace(std::to_string(root))), left_(time) {}

void MappedFiles::add(pid_t pid) {
    const auto begin = Clock::now();
    if (expected_ == nullptr)
        deadline_ = begin + left_;
    try {
        look_at(pid);
    } catch (const Error& e) {
        if (e.error_number() != ENOENT && e.error_number() != ESRCH)
            ++unrecorded_;
    }
    left_ -= std::min(left_, Clock::now() - begin);
}

void MappedFiles::look_at(pid_t pid) {
    const std::string space = mount_namespace(std::to_string(pid));
    const FilePlace place = space == ours_    ? FilePlace::host
                            : space == roots_ ? FilePlace::container
                                              : FilePlace::inner;
    for (const Mapping& mapping : file_mappings(pid)) {
        const bool executable = is_executable(mapping);
        std::tuple key{space, mapping.name, mapping.inode};
        auto seen = seen_.find(key);
        if (seen != seen_.end() && (seen->second || !executable))
            continue;
        if (Clock::now() >= deadline_) {
            ++unrecorded_;
            continue;
        }
        if (seen == seen_.end()) {
            if (seen_.size() == kMaxSeen || seen_size_ + mapping.name.size() > kMaxSeenSize) {
                ++unrecorded_;
                continue;
            }
            seen_size_ += mapping.name.size();
            seen = seen_.try_emplace(std::move(key)).first;
        }
        seen->second = executable;
        try {
            note(place, link_of(pid, mapping), executable);
        } catch (const Error&) {
            ++unrecorded_;
        }
    }
}

void MappedFiles::note(FilePlace place, const std::string& link, bool executable) {
    struct stat status {};
    if (::stat(link.c_str(), &status) != 0)
        throw io_error("cannot examine " + link, errno);
    if (!S_ISREG(status.st_mode) || status.st_nlink == 0)
        return;
    RequiredFile file{.place = place, .path = path_behind(link)};
    if (has_no_name(file.path))
        return;
    const RequiredFile* expected = expected_of(file);
    if (expected_ != nullptr && expected == nullptr)
        return;
    if (file.path.size() > format::kMaxRequiredPath || !file.path.starts_with('/'))
        throw Error(Errc::unsupported, "no path that can be recorded: " + file.path);
    file.size = static_cast<std::uint64_t>(status.st_size);
    const bool is_open_question =
        expected == nullptr ||
        (expected->identity != FileIdentity::size && expected->size == file.size);
    try {
        if (executable && is_open_question)
            identify(link, file, {status.st_dev, status.st_ino},
                     expected == nullptr ? FileIdentity::size : expected->identity);
    } catch (const Error& e) {
        if (expected != nullptr) {
            unreadable_.emplace_back(*expected, e.what());
            return;
        }
        throw;
    }
    keep(std::move(file), executable);
}

/// Null: there is no record, or it is not in it.
const RequiredFile* MappedFiles::expected_of(const RequiredFile& file) const {
    if (expected_ == nullptr)
        return nullptr;
    const auto at = std::ranges::lower_bound(expected_->files, file, comes_before);
    return at == expected_->files.end() || comes_before(file, *at) ? nullptr : &*at;
}

void MappedFiles::identify(const std::string& link, RequiredFile& file, Inode inode,
                           FileIdentity wanted) {
    const std::pair key(inode, wanted);
    auto known = known_.find(key);
    if (known == known_.end()) {
        if (known_.size() == kMaxSeen)
            return;
        known = known_.emplace(key, identity_of(link, file.size, wanted)).first;
    }
    if (known->second.identity == FileIdentity::content) {
        if (hashed_ + file.size > format::kMaxHashedFiles)
            return;
        hashed_ += file.size;
    }
    file.identity = known->second.identity;
    file.id = known->second.id;
}

MappedFiles::Known MappedFiles::identity_of(const std::string& link, std::uint64_t size,
                                            FileIdentity wanted) {
    const auto fd = open_if_regular(AT_FDCWD, link);
    if (!fd)
        return {};
    if (wanted != FileIdentity::content) {
        auto id = find_build_id(fd->get());
        if (!id.empty() || wanted == FileIdentity::build_id)
            return {FileIdentity::build_id, std::move(id)};
    }
    if (size > format::kMaxHashedFile || hashed_ + size > format::kMaxHashedFiles)
        return {};
    auto id = hash_file(fd->get(), size, deadline_);
    const auto identity = id.empty() ? FileIdentity::size : FileIdentity::content;
    return {identity, std::move(id)};
}

void MappedFiles::keep(RequiredFile file, bool executable) {
    const auto at = files_.find(std::pair(file.place, file.path));
    if (at == files_.end()) {
        if (files_.size() == format::kMaxRequiredFiles ||
            paths_size_ + file.path.size() > format::kMaxRequiredPaths) {
            ++unrecorded_;
            return;
        }
        paths_size_ += file.path.size();
        std::pair key(file.place, file.path);
        files_.emplace(std::move(key), Kept{std::move(file), executable});
        return;
    }
    Kept& kept = at->second;
    // One without an identity, which time or a limit denied it, may be another one as well.
    const bool differ = kept.file.size != file.size ||
                        (kept.executable && executable &&
                         (kept.file.identity != file.identity || kept.file.id != file.id));
    if (kept.ambiguous) {
        ++unrecorded_;
    } else if (differ) {
        kept.ambiguous = true;
        unrecorded_ += 2;
    } else if (executable && !kept.executable) {
        kept.file = std::move(file);
        kept.executable = true;
    }
}

Requirements MappedFiles::result() const {
    Requirements found;
    found.unrecorded = unrecorded_;
    for (const auto& [key, kept] : files_)
        if (!kept.ambiguous)
            found.files.push_back(kept.file);
    return found;
}

} // namespace gpustasis
