// SPDX-License-Identifier: Apache-2.0
#include "core/arena.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/trusted_directory.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdio>
#include <fstream>
#include <span>
#include <utility>
#include <vector>

namespace gpustasis {
namespace {

constexpr const char* kMarkerFirst = "gpustasis-arena 1";
constexpr const char* kOwnerFirst = "gpustasis-arena-owner 1";
constexpr std::uint64_t kMaxText = 16U << 10;
constexpr mode_t kPermissions = 07777;

[[noreturn]] void corrupt(const std::string& name, const std::string& what) {
    throw Error(Errc::corrupt_data, name + ": " + what);
}

void require_path(const std::string& path) {
    if (!path.starts_with('/') || path.find('\n') != std::string::npos)
        throw Error(Errc::bad_argument,
                    "an arena can belong to no directory of this path: " + path);
}

/// Takes "key value" line by line, in the order in which they are written.
class Lines {
public:
    Lines(const std::string& text, std::string name, const std::string& first)
        : text_(text), name_(std::move(name)) {
        const std::string version = line();
        const std::string kind = first.substr(0, first.find(' ') + 1);
        if (version != first && version.starts_with(kind))
            throw Error(Errc::unsupported, name_ + ": version " + version.substr(kind.size()) +
                                               " is not known to this gpustasis");
        if (version != first)
            corrupt(name_, "does not begin with \"" + first + "\"");
    }

    std::string value(const std::string& key) {
        const std::string found = line();
        if (!found.starts_with(key + " ") || found.size() == key.size() + 1)
            corrupt(name_, "lacks " + key);
        return found.substr(key.size() + 1);
    }
    std::uint64_t number(const std::string& key) {
        const std::string text = value(key);
        std::uint64_t parsed = 0;
        const char* end = text.data() + text.size();
        const auto [at, error] = std::from_chars(text.data(), end, parsed);
        if (error != std::errc{} || at != end)
            corrupt(name_, key + " is no number: " + text);
        return parsed;
    }
    Id id(const std::string& key) {
        const std::string text = value(key);
        Id parsed{};
        for (std::size_t i = 0; i < parsed.size() && text.size() == 2 * parsed.size(); ++i) {
            unsigned byte = 0;
            const auto [at, error] =
                std::from_chars(text.data() + 2 * i, text.data() + 2 * i + 2, byte, 16);
            if (error != std::errc{} || at != text.data() + 2 * i + 2)
                break;
            parsed[i] = static_cast<std::byte>(byte);
        }
        if (id_text(parsed) != text)
            corrupt(name_, key + " is no id: " + text);
        return parsed;
    }
    std::string path(const std::string& key) {
        std::string found = value(key);
        if (!found.starts_with('/'))
            corrupt(name_, key + " is no absolute path: " + found);
        return found;
    }
    bool is_at_end() const { return at_ == text_.size(); }
    void end() const {
        if (!is_at_end())
            corrupt(name_, "has more lines than it can have");
    }

private:
    std::string line() {
        const std::size_t end = text_.find('\n', at_);
        if (end == std::string::npos)
            corrupt(name_, "is cut short");
        return text_.substr(std::exchange(at_, end + 1), end - at_);
    }

    const std::string& text_;
    std::string name_;
    std::size_t at_ = 0;
};

std::string read_text(int fd, const std::string& name) {
    const std::uint64_t size = file_size(fd);
    if (size > kMaxText)
        corrupt(name, "is too long");
    std::string text(size, '\0');
    read_at(fd, 0, std::as_writable_bytes(std::span(text)));
    return text;
}

bool has_manifest(int directory) {
    if (::faccessat(directory, kManifestName, F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return true;
    if (errno != ENOENT)
        throw io_error("cannot look for " + std::string(kManifestName), errno);
    return false;
}

UniqueFd reopened(int directory) {
    UniqueFd again(::openat(directory, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!again)
        throw io_error("cannot open " + directory_path(directory) + " again", errno);
    return again;
}

[[noreturn]] void lost(int image_dir, const ArenaMarker& marker, const std::string& why) {
    throw Error(Errc::io, "the checkpoint in " + directory_path(image_dir) +
                              " was never drained, and it is lost: its memory was in " +
                              marker.directory + ", " + why);
}

UniqueFd local_directory(int image_dir, const ArenaMarker& marker) {
    if (marker.boot_id != this_boot())
        lost(image_dir, marker, "and this host was booted since");
    UniqueFd found(
        ::open(marker.directory.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!found && errno == ENOENT)
        lost(image_dir, marker, "which is not there any more");
    if (!found)
        throw io_error("cannot open " + marker.directory +
                           ", where the memory of the checkpoint in " + directory_path(image_dir) +
                           " is",
                       errno);
    require_arena(found.get(), marker.directory);
    const ArenaOwner owner = read_owner(found.get());
    if (owner.checkpoint_id != marker.checkpoint_id || owner.boot_id != marker.boot_id)
        corrupt(marker.directory, "holds checkpoint " + id_text(owner.checkpoint_id) +
                                      ", and the one in " + directory_path(image_dir) + " is " +
                                      id_text(marker.checkpoint_id));
    return found;
}

} // namespace

std::string this_boot() {
    std::ifstream file("/proc/sys/kernel/random/boot_id");
    std::string text;
    if (!std::getline(file, text) || text.empty())
        throw Error(Errc::io, "cannot read /proc/sys/kernel/random/boot_id");
    return text;
}

std::string marker_text(const ArenaMarker& marker) {
    require_path(marker.directory);
    return std::string(kMarkerFirst) + "\ncheckpoint " + id_text(marker.checkpoint_id) + "\nboot " +
           marker.boot_id + "\ndirectory " + marker.directory + "\ndevice " +
           std::to_string(marker.device) + "\ninode " + std::to_string(marker.inode) + "\n";
}

std::string owner_text(const ArenaOwner& owner) {
    require_path(owner.images);
    return std::string(kOwnerFirst) + "\ncheckpoint " + id_text(owner.checkpoint_id) + "\nboot " +
           owner.boot_id + "\ntime " + std::to_string(owner.time) + "\ndevice " +
           std::to_string(owner.device) + "\ninode " + std::to_string(owner.inode) + "\nlimit " +
           std::to_string(owner.limit) + "\npool " + std::to_string(owner.pool) + "\nimages " +
           owner.images + "\n";
}

ArenaMarker parse_marker(const std::string& text, const std::string& name) {
    Lines lines(text, name, kMarkerFirst);
    ArenaMarker marker;
    marker.checkpoint_id = lines.id("checkpoint");
    marker.boot_id = lines.value("boot");
    marker.directory = lines.path("directory");
    if (!lines.is_at_end()) { // an older version says no more
        marker.device = lines.number("device");
        marker.inode = lines.number("inode");
    }
    lines.end();
    return marker;
}

ArenaOwner parse_owner(const std::string& text, const std::string& name) {
    Lines lines(text, name, kOwnerFirst);
    ArenaOwner owner;
    owner.checkpoint_id = lines.id("checkpoint");
    owner.boot_id = lines.value("boot");
    owner.time = lines.number("time");
    owner.device = lines.number("device");
    owner.inode = lines.number("inode");
    owner.limit = lines.number("limit");
    owner.pool = lines.number("pool");
    owner.images = lines.path("images");
    lines.end();
    return owner;
}

std::optional<ArenaMarker> find_marker(int image_dir) {
    const std::string name = directory_path(image_dir) + "/" + kArenaMarker;
    const UniqueFd file(
        ::openat(image_dir, kArenaMarker, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
    if (!file && errno == ENOENT)
        return std::nullopt;
    if (!file)
        throw io_error("cannot open " + name, errno);
    struct stat status {};
    if (::fstat(file.get(), &status) != 0)
        throw io_error("cannot examine " + name, errno);
    if (!S_ISREG(status.st_mode))
        corrupt(name, "is no regular file");
    if (status.st_size ==
        0) // of a machine that has lost its power, and the arena with it: nothing was synced
        return std::nullopt;
    return parse_marker(read_text(file.get(), name), name);
}

bool is_lost(const ArenaMarker& marker) {
    if (marker.boot_id != this_boot())
        return true;
    if (::faccessat(AT_FDCWD, marker.directory.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return false;
    if (errno != ENOENT)
        throw io_error("cannot look for " + marker.directory, errno);
    const std::string path = marker.directory.substr(0, marker.directory.rfind('/'));
    const UniqueFd arena(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!arena)
        throw io_error("cannot open " + path, errno);
    struct stat found {};
    if (::fstat(arena.get(), &found) != 0)
        throw io_error("cannot examine " + path, errno);
    // Where an arena was mounted that is not seen from here, as in another mount namespace, another directory is seen.
    if (found.st_dev != marker.device || found.st_ino != marker.inode)
        throw Error(Errc::io, path + " is not the arena in which " + marker.directory +
                                  " was made: that may not be seen from here");
    // In that one, whatever has been mounted since the first look.
    const std::string name = marker.directory.substr(path.size() + 1);
    if (::faccessat(arena.get(), name.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) == 0)
        return false;
    if (errno != ENOENT)
        throw io_error("cannot look for " + marker.directory, errno);
    return true;
}

ArenaOwner read_owner(int directory) {
    const std::string name = directory_path(directory) + "/" + kArenaOwner;
    const std::string text = read_trusted(directory, kArenaOwner, name, kMaxText);
    if (text.empty())
        throw Error(Errc::io, name + " is missing: it says whose these images are");
    return parse_owner(text, name);
}

void require_arena(int directory, const std::string& path) {
    struct stat status {};
    struct statfs system {};
    if (::fstat(directory, &status) != 0 || ::fstatfs(directory, &system) != 0)
        throw io_error("cannot examine " + path, errno);
    if (system.f_type != TMPFS_MAGIC)
        throw Error(Errc::bad_argument,
                    path + " is not on a tmpfs: an arena is a directory in memory");
    require_trusted(directory, path);
    if ((status.st_mode & kPermissions) == S_IRWXU)
        return;
    char mode[8];
    std::snprintf(mode, sizeof mode, "%04o", status.st_mode & kPermissions);
    throw Error(Errc::bad_argument,
                path + " has mode " + mode + ": an arena has 0700, for it holds memory of jobs");
}

// A drain writes the manifest before it removes the marker, and the arena directory after that.
UniqueFd stored_directory(int image_dir) {
    if (has_manifest(image_dir))
        return reopened(image_dir);
    const std::optional<ArenaMarker> marker = find_marker(image_dir);
    if (!marker)
        return reopened(image_dir);
    try {
        return local_directory(image_dir, *marker);
    } catch (const Error&) {
        if (has_manifest(image_dir)) // drained meanwhile
            return reopened(image_dir);
        throw;
    }
}

} // namespace gpustasis
