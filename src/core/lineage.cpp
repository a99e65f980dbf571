// SPDX-License-Identifier: Apache-2.0
#include "core/lineage.hpp"

#include "core/arena.hpp"
#include "core/chunk_io.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/image_format.hpp"
#include "core/image_metadata.hpp"
#include "core/manifest.hpp"

#include <fcntl.h>
#include <poll.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <exception>
#include <filesystem>
#include <utility>

namespace gpustasis {
namespace {

bool is_checkpoint(int directory, const Id& id, const ReadManifest& read) noexcept {
    try {
        return read(directory).checkpoint_id == id;
    } catch (const std::exception&) {
        return false;
    }
}

UniqueFd open_if_right(const std::filesystem::path& place, const Id& id, const ReadManifest& read) {
    UniqueFd directory(::open(place.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    return directory && is_checkpoint(directory.get(), id, read) ? std::move(directory)
                                                                 : UniqueFd();
}

constexpr const char* kNewLink = ".gpustasis-parent.part";

/// Opened anew and not duplicated: a lock taken on a duplicate would be held for as long as the
/// caller's own descriptor is open, or a process that has inherited it lives.
UniqueFd reopen(int dir_fd) {
    UniqueFd copy(::openat(dir_fd, ".", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!copy)
        throw io_error("cannot open " + directory_path(dir_fd) + " again", errno);
    return copy;
}

bool same_file(const struct stat& a, const struct stat& b) noexcept {
    return a.st_dev == b.st_dev && a.st_ino == b.st_ino;
}

struct stat status_of(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0)
        throw io_error("fstat", errno);
    return status;
}

// Where locks do not work, whoever removes a checkpoint cannot get the exclusive one either.
void lock_shared(int fd, const std::string& path) {
    // Who looks through a store holds a lock for a moment; who removes a checkpoint, until it is gone.
    constexpr int kPatienceMs = 500;
    for (int waited = 0; ::flock(fd, LOCK_SH | LOCK_NB) != 0; ++waited) {
        if (errno == EINTR)
            continue;
        if (errno != EWOULDBLOCK)
            return;
        if (waited < kPatienceMs) {
            ::poll(nullptr, 0, 1);
            continue;
        }
        throw Error(Errc::io, path + " is locked: somebody is about to remove that checkpoint");
    }
}

/// What the link in `child_fd` says, fit for a message; empty if it cannot be read.
std::string link_target(int child_fd) {
    char text[PATH_MAX];
    const ssize_t size = ::readlinkat(child_fd, kParentLink, text, sizeof text);
    if (size <= 0)
        return {};
    std::string target(text, static_cast<std::size_t>(size));
    std::ranges::replace_if(target, [](unsigned char c) { return c < 0x20 || c == 0x7f; }, '?');
    return target;
}

[[noreturn]] void refuse_replaced(const std::string& path, const char* how) {
    throw Error(Errc::corrupt_data, path + " is another image: " + how);
}

} // namespace

/// By the link in the directory at `depth`; where that leads nowhere, as in a checkpoint that came from another
/// host, by the id that its manifest gives.
UniqueFd Lineage::open_link_or_search(std::uint32_t depth) {
    const int child_fd = directories_[depth].fd.get();
    const std::string& child = directories_[depth].path;
    UniqueFd fd(::openat(child_fd, kParentLink, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (fd)
        return fd;
    const int error = errno;
    const std::string target = link_target(child_fd);
    const Error why = io_error("cannot follow " + child + "/" + kParentLink +
                                   (target.empty() ? "" : " to " + target),
                               error);
    Id parent{}; // also where there is no manifest: in the directory of a dump that has not come so far
    try {
        parent = read_manifest_in(depth, child_fd).parent_id;
    } catch (const std::exception&) {
        throw why;
    }
    if (parent == Id{})
        throw why;
    fd = find_checkpoint(parent, kStoreRoot,
                         [&](int directory) { return read_manifest_in(depth + 1, directory); });
    if (fd)
        return fd;
    throw Error(why, std::string(why.what()) + "; and the parent, checkpoint " + id_text(parent) +
                         ", is not in " + searched_places());
}

UniqueFd find_checkpoint(const Id& id, const std::string& root, const ReadManifest& read) {
    const std::filesystem::path top = root;
    const std::string name = id_text(id);
    if (UniqueFd found = open_if_right(top / "checkpoints" / name, id, read))
        return found;
    std::error_code error;
    for (std::filesystem::directory_iterator at(top / "containers", error), end;
         !error && at != end; at.increment(error))
        if (UniqueFd found = open_if_right(at->path() / name, id, read))
            return found;
    return {};
}

std::string searched_places(const std::string& root) {
    return root + "/checkpoints and " + root + "/containers/*";
}

std::string id_text(const Id& id) {
    std::string text;
    char byte[3];
    for (const std::byte b : id) {
        std::snprintf(byte, sizeof byte, "%02x", std::to_integer<unsigned>(b));
        text += byte;
    }
    return text;
}

std::string directory_path(int dir_fd) {
    std::error_code error;
    const auto path =
        std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(dir_fd), error);
    return error ? "." : path.string();
}

void link_parent(int dir_fd, int parent_fd, LinkText text) {
    if (same_file(status_of(dir_fd), status_of(parent_fd)))
        throw Error(Errc::bad_argument,
                    directory_path(dir_fd) + ": a checkpoint cannot be its own parent");
    const std::filesystem::path from = directory_path(dir_fd);
    const std::filesystem::path to = directory_path(parent_fd);
    const std::filesystem::path leads =
        text == LinkText::absolute ? to : to.lexically_relative(from);
    ::unlinkat(dir_fd, kNewLink, 0);
    if (::symlinkat(leads.c_str(), dir_fd, kNewLink) != 0 ||
        ::renameat(dir_fd, kNewLink, dir_fd, kParentLink) != 0 || ::fsync(dir_fd) != 0)
        throw io_error("cannot make " + (from / kParentLink).string(), errno);
}

Lineage::Lineage(int dir_fd) {
    Directory own{reopen(dir_fd), directory_path(dir_fd)};
    lock_shared(own.fd.get(), own.path);
    directories_.push_back(std::move(own));
}

Lineage Lineage::above(int parent_fd) {
    Lineage lineage;
    Directory parent{reopen(parent_fd), directory_path(parent_fd)};
    lock_shared(parent.fd.get(), parent.path);
    // It may have been moved away for removal before the lock was ours.
    struct stat there {};
    if (::stat(parent.path.c_str(), &there) != 0 || !same_file(there, status_of(parent.fd.get())))
        throw Error(Errc::io, parent.path + " was removed or replaced meanwhile");
    lineage.directories_.emplace_back();
    lineage.directories_.push_back(std::move(parent));
    return lineage;
}

void Lineage::open_by(std::shared_ptr<ChainFiles> files) {
    opener_ = std::move(files);
}

// Where the files of the parent are: in an arena, if it is not drained yet.
UniqueFd Lineage::open_stored_parent(std::uint32_t depth) {
    UniqueFd found = open_link_or_search(depth);
    return opener_ ? std::move(found) : stored_directory(found.get());
}

Lineage::Directory Lineage::open_parent(std::uint32_t depth) {
    Directory parent{open_stored_parent(depth), {}};
    parent.path = directory_path(parent.fd.get());
    const struct stat status = status_of(parent.fd.get());
    // A dump would write over what it is built on.
    for (const Directory& below : directories_)
        if (below.fd && same_file(status, status_of(below.fd.get())))
            throw Error(Errc::corrupt_data, directories_[depth].path + "/" + kParentLink +
                                                " leads back to " + below.path +
                                                ", which is built on that one: a circle");
    lock_shared(parent.fd.get(), parent.path);
    if (!same_file(status, status_of(open_stored_parent(depth).get())))
        throw Error(Errc::io, parent.path + " was removed or replaced meanwhile");
    return parent;
}

int Lineage::directory(std::uint32_t depth) {
    if (depth > format::kMaxDepth)
        throw Error(Errc::bad_argument, "depth out of range: " + std::to_string(depth));
    while (directories_.size() <= depth)
        directories_.push_back(open_parent(static_cast<std::uint32_t>(directories_.size() - 1)));
    return directories_[depth].fd.get();
}

const std::string& Lineage::path(std::uint32_t depth) {
    directory(depth);
    return directories_[depth].path;
}

std::shared_ptr<const UniqueFd> Lineage::file(const Source& source) {
    const Place place{source.depth, source.pid, source.kind};
    const auto known = files_.find(place);
    if (known != files_.end() && known->second.first == source.digest)
        return known->second.second;
    const std::string name = image_name(source.pid, source.kind);
    const std::string whose = name + " of checkpoint " + id_text(source.checkpoint_id) +
                              (source.depth == 0 ? ", this one" : ", which this one is built on");
    try {
        const int dir = directory(source.depth);
        const std::string place_name = path(source.depth) + "/" + name;
        auto file = std::make_shared<UniqueFd>(open_regular(dir, name));
        if (const std::uint64_t size = file_size(file->get());
            size != source.file_size || size < sizeof(Id))
            refuse_replaced(place_name, "it has another size");
        Id digest;
        read_at(file->get(), source.file_size - sizeof(Id), digest);
        if (digest != source.digest)
            refuse_replaced(place_name, "it has another digest");
        files_[place] = {source.digest, file};
        return file;
    } catch (const Error& e) {
        throw Error(e, whose + ", is missing or was replaced: " + e.what());
    }
}

std::shared_ptr<const ImageInput> Lineage::input(const Source& source, IoMode io) {
    const std::string name = image_name(source.pid, source.kind);
    try {
        std::shared_ptr<const ImageInput> found = opened(source.depth, name);
        if (!found)
            return std::make_shared<const ChunkInput>(file(source), 0, source.file_size, io);
        const std::string place = path(source.depth) + "/" + name;
        if (manifest(source.depth).checkpoint_id != source.checkpoint_id)
            refuse_replaced(place, "it is of another checkpoint");
        if (found->size() != source.file_size || found->size() < sizeof(Id))
            refuse_replaced(place, "it has another size");
        Id digest;
        if (!std::ranges::equal(found->read(source.file_size - sizeof(Id), sizeof(Id), digest),
                                source.digest))
            refuse_replaced(place, "it has another digest");
        return found;
    } catch (const Error& e) {
        if (!opener_)
            throw;
        throw Error(e, name + " of checkpoint " + id_text(source.checkpoint_id) +
                           ", which this one is built on, is missing or was replaced: " + e.what());
    }
}

std::shared_ptr<const ImageInput> Lineage::opened(std::uint32_t depth, const std::string& name) {
    if (!opener_)
        return nullptr;
    const int at = directory(depth);
    try {
        return opener_->open(depth, at, name);
    } catch (const Error& e) {
        throw Error(e, path(depth) + ": " + e.what());
    }
}

Manifest Lineage::manifest(std::uint32_t depth) {
    return read_manifest_in(depth, directory(depth));
}

Manifest Lineage::read_manifest_in(std::uint32_t depth, int directory) {
    if (!opener_)
        return read_manifest(directory);
    const std::shared_ptr<const ImageInput> found = opener_->open(depth, directory, kManifestName);
    if (found->size() > max_manifest_size())
        throw Error(Errc::corrupt_data, std::string(kManifestName) + " is too long");
    std::vector<std::byte> bytes(found->size());
    found->read(0, bytes.size(), bytes);
    return parse_manifest(bytes, kManifestName);
}

void Lineage::close() noexcept {
    opener_.reset();
    files_.clear();
    directories_.clear();
}

std::vector<int> Lineage::descriptors() const {
    std::vector<int> all;
    for (const Directory& directory : directories_)
        if (directory.fd)
            all.push_back(directory.fd.get());
    for (const auto& [where, file] : files_)
        all.push_back(file.second->get());
    return all;
}

} // namespace gpustasis
