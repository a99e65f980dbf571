// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/parent_choice.hpp"

#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/image_metadata.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "cuda_plugin/sealed_key.hpp"
#include "seal/sealed_chain.hpp"
#include "seal/sealed_checkpoint.hpp"
#include "seal/signed_directory.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <climits>
#include <memory>
#include <utility>

namespace gpustasis {
namespace {

constexpr const char* kCriuLink = "parent"; // CRIU's CR_PARENT_LINK
constexpr int kMaxHops = 64;                // pre-dumps, which have no manifest, between two dumps

UniqueFd open_directory(int dir_fd, const char* path) {
    return UniqueFd(::openat(dir_fd, path, O_RDONLY | O_DIRECTORY | O_CLOEXEC));
}

bool exists(int dir_fd, const char* name) {
    return ::faccessat(dir_fd, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

bool has_manifest(int dir_fd) {
    return exists(dir_fd, kManifestName) || exists(dir_fd, seal::kSealedName) ||
           exists(dir_fd, kArenaMarker);
}

struct stat status_of(int fd) {
    struct stat status {};
    if (::fstat(fd, &status) != 0)
        throw io_error("cannot examine " + directory_path(fd), errno);
    return status;
}

bool is_same(int dir, int other) {
    const struct stat one = status_of(dir);
    const struct stat two = status_of(other);
    return one.st_dev == two.st_dev && one.st_ino == two.st_ino;
}

ParentChoice full(std::string reason) {
    return {.index = {}, .directory = {}, .reason = std::move(reason), .held = {}};
}

/// Why a dump cannot be built on the checkpoint in `dir`; empty: it can. One key lineage, or none: in the
/// clear would be what the dump seals, or sealed for nobody that the dump names what it needs.
std::string why_not_alike(const Config& config, int dir, bool is_sealed) {
    if (!config.sign.empty() && !seal::has_signed(dir))
        return directory_path(dir) +
               " is not signed, and a signed checkpoint is built on signed ones alone";
    if (holds_sealed(dir) == is_sealed)
        return {};
    return directory_path(dir) +
           (is_sealed ? " is in the clear, and a sealed checkpoint is built on sealed ones alone"
                      : " is sealed, and the dump is not: it names no recipients");
}

Manifest manifest_of(int dir, const std::optional<seal::DataKey>& key) {
    if (!key)
        return read_manifest(dir);
    const seal::SealedCheckpoint sealed(dir, *key);
    if (!sealed.has(kManifestName))
        throw Error(Errc::corrupt_data, "no sealed file holds " + std::string(kManifestName));
    Manifest manifest =
        parse_manifest(sealed.read(kManifestName, max_manifest_size()), kManifestName);
    if (manifest.chain_length != key->ancestor_count())
        throw Error(Errc::corrupt_data, "its envelope holds the keys of " +
                                            std::to_string(key->ancestor_count()) +
                                            " earlier checkpoints, and it is built on " +
                                            std::to_string(manifest.chain_length));
    return manifest;
}

UniqueFd named_parent(const Config& config, int image_dir) {
    UniqueFd dir = open_directory(image_dir, config.parent.c_str());
    if (!dir)
        throw io_error("cannot open the parent " + config.parent, errno);
    if (!has_manifest(dir.get()))
        throw Error(Errc::bad_argument,
                    "the parent " + config.parent + " is no checkpoint of this plugin");
    return dir;
}

/// None if no checkpoint of ours is behind CRIU's links.
UniqueFd linked_parent(int image_dir) {
    UniqueFd dir = open_directory(image_dir, kCriuLink);
    for (int hop = 0; dir && hop < kMaxHops; ++hop) {
        if (has_manifest(dir.get()))
            return dir;
        dir = open_directory(dir.get(), kCriuLink);
    }
    return {};
}

/// None if there is none to build on.
UniqueFd find_parent(const Config& config, int image_dir, const ContainerStore* store) {
    if (!config.parent.empty())
        return named_parent(config, image_dir);
    return store != nullptr ? store->newest() : linked_parent(image_dir);
}

/// The same, but where its files are: in the arena, if it is local.
UniqueFd find_stored_parent(const Config& config, int image_dir, const ContainerStore* store) {
    UniqueFd dir = find_parent(config, image_dir, store);
    return dir ? stored_directory(dir.get()) : std::move(dir);
}

/// Whether the files of the checkpoint `dir` lie in an arena.
bool is_local(int dir) {
    return exists(dir, kArenaOwner);
}

/// Of the parent that `lineage` has at depth 1.
ParentChoice read_chosen(const Config& config, Lineage& lineage) {
    ParentChoice choice;
    choice.directory = lineage.path(1);
    choice.index = ParentIndex::read(lineage);
    if (config.chunk_size != 0 && config.chunk_size != choice.index->chunk_size())
        throw Error(Errc::bad_argument, "chunk_size = " + std::to_string(config.chunk_size) +
                                            ": the parent " + choice.directory + " has " +
                                            std::to_string(choice.index->chunk_size()));
    return choice;
}

UniqueFd open_above(int dir) {
    UniqueFd above(::openat(dir, "..", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    if (!above)
        throw io_error("cannot open the directory above " + directory_path(dir), errno);
    return above;
}

/// What `dir` is linked to as its parent; empty: to nothing.
std::string linked_to(int dir) {
    char text[PATH_MAX];
    const ssize_t size = ::readlinkat(dir, kParentLink, text, sizeof text);
    return {text, static_cast<std::size_t>(std::max<ssize_t>(size, 0))};
}

/// Whether that is the image directory which is open as `dir`. Its disk may have had another number before it was mounted
/// again.
bool is_images_of(int dir, const ArenaOwner& owner) {
    const struct stat own = status_of(dir);
    return owner.inode == own.st_ino &&
           (owner.device == own.st_dev || owner.images == directory_path(dir));
}

/// Whether the checkpoint in `child`, a directory of an arena, is built on the checkpoint `id`, which is in `image_dir`,
/// itself or by what it is built on there.
bool is_built_on(int child, int image_dir, const Id& id) {
    UniqueFd parent;
    int dir = child;
    for (std::uint32_t depth = 0; depth < format::kMaxDepth; ++depth) {
        const std::string link = linked_to(dir);
        // Out of the arena, to a disk that may not answer. What has no manifest yet is under way.
        if (link.starts_with('/'))
            return link == directory_path(image_dir) &&
                   (!exists(dir, kManifestName) || read_manifest(dir).parent_id == id);
        if (link.empty())
            return false;
        parent = open_directory(dir, link.c_str());
        if (!parent || !is_local(parent.get()))
            return false;
        dir = parent.get();
        // Another directory may have the number of one that was removed: what is there says whether it is that.
        if (const ArenaOwner owner = read_owner(dir);
            owner.checkpoint_id == id && is_images_of(image_dir, owner))
            return true;
    }
    return false;
}

/// Whether nobody can want what is in `dir`, of an arena: it is over, or of a dump that was broken off.
bool is_left(int dir) {
    return exists(dir, kArenaOver) ||
           (!exists(dir, kManifestName) && ::flock(dir, LOCK_EX | LOCK_NB) == 0);
}

[[noreturn]] void refuse_needed(const std::string& child, const std::string& images,
                                const std::string& in_arena) {
    throw Error(Errc::unsupported,
                "the checkpoint in " + child + " is only in memory yet, and built on what " +
                    images + " holds: a dump into it would replace that: drain the other (" +
                    "gpustasis drain " + child + "), give it up (gpustasis arena discard " +
                    in_arena + "), or use another directory");
}

void remove_link(int dir) {
    if (::unlinkat(dir, kParentLink, 0) != 0 && errno != ENOENT)
        throw io_error(std::string("cannot remove the old ") + kParentLink, errno);
}

ParentChoice choose(const Config& config, int image_dir, Lineage& lineage,
                    const ContainerStore* store, SealedDump* sealed) {
    const int own = lineage.directory(0);
    if (!config.externalize && config.cpu_memory == CpuMemory::criu) {
        if (!config.parent.empty())
            throw Error(Errc::bad_argument,
                        "parent = \"" + config.parent + "\": needs externalize, which is off");
        return full("externalize is off");
    }
    const UniqueFd parent_dir = find_parent(config, image_dir, store);
    const UniqueFd dir = parent_dir ? stored_directory(parent_dir.get()) : UniqueFd();
    if (!dir)
        return full(store != nullptr ? "no checkpoint in " + store->path() : "no parent");
    if (const std::string why_not = why_not_alike(config, dir.get(), sealed != nullptr);
        !why_not.empty()) {
        if (!config.parent.empty())
            throw Error(Errc::bad_argument, "the parent " + why_not);
        return full(why_not);
    }
    const bool parent_is_local = is_local(dir.get());
    if (parent_is_local && !config.arena.is_used) {
        const std::string why_not =
            "is only in memory yet, in " + directory_path(dir.get()) +
            ", and the dump is not (tier = \"disk\"): drain it first, with gpustasis drain";
        if (!config.parent.empty())
            throw Error(Errc::unsupported, "the parent " + config.parent + " " + why_not);
        return full("the parent " + why_not);
    }
    if (parent_is_local && !is_same(open_above(dir.get()).get(), open_above(own).get())) {
        const std::string why_not = directory_path(dir.get()) +
                                    " is in another arena: drain it first, with gpustasis drain";
        if (!config.parent.empty())
            throw Error(Errc::unsupported, "the parent " + why_not);
        return full(why_not); // what is built on it would not keep it there
    }
    std::optional<seal::DataKey> key;
    Manifest parent;
    try {
        if (sealed != nullptr)
            key = sealed->open_parent(dir.get(), config.private_key);
        parent = manifest_of(dir.get(), key);
    } catch (const Error& e) {
        if (!key && sealed == nullptr)
            throw;
        throw Error(e, "the parent " + directory_path(dir.get()) + ": " + e.what());
    }
    if (parent.chain_length >= config.max_chain ||
        (key && parent.chain_length >= seal::DataKey::kMaxAncestors))
        return full("max_chain: " + directory_path(dir.get()) + " ends a chain of " +
                    std::to_string(parent.chain_length));
    if (key && std::ranges::none_of(parent.tasks, &ManifestTask::externalized))
        return full(directory_path(dir.get()) + " holds no memory to build on");
    const bool in_store = config.parent.empty() && store != nullptr;
    // An arena and what is on a disk are never moved together.
    const bool moves = !in_store && config.arena.is_used == parent_is_local;
    {
        // Who gives up a local one looks for others that are built on it.
        UniqueFd arena;
        if (parent_is_local)
            arena = open_above(own);
        if (arena && !lock_file(arena.get(), LOCK_EX, kLockPatienceMs, "the arena"))
            throw Error(Errc::io,
                        "the arena above " + directory_path(own) + " is locked: try again");
        link_parent(own, dir.get(), moves ? LinkText::relative : LinkText::absolute);
    }
    lineage.directory(1);        // and its lock: from here on nobody removes it
    std::optional<Lineage> held; // and what is left of it when it is drained
    if (parent_is_local)
        held = Lineage::above(parent_dir.get());
    const UniqueFd again = find_stored_parent(config, image_dir, store);
    // One that was drained meanwhile is the same: what is locked stays for as long as a link leads there.
    if (!again || (directory_path(again.get()) != lineage.path(1) &&
                   (key || read_manifest(again.get()).checkpoint_id != parent.checkpoint_id)))
        throw Error(Errc::io, lineage.path(1) + " was removed or replaced meanwhile");
    if (!key) {
        ParentChoice choice = read_chosen(config, lineage);
        choice.held = std::move(held);
        return choice;
    }
    // What fails here may be let pass, and then the dump is built on nothing.
    try {
        sealed->build_on(*key);
        lineage.open_by(std::make_shared<seal::SealedChain>(sealed->key()));
        return read_chosen(config, lineage);
    } catch (...) {
        sealed->build_on_nothing();
        lineage.open_by(nullptr);
        throw;
    }
}

} // namespace

void refuse_circle(const Config& config, int image_dir) {
    const UniqueFd parent = config.parent.empty()
                                ? linked_parent(image_dir)
                                : open_directory(image_dir, config.parent.c_str());
    if (!parent) // which choose_parent() tells
        return;
    const auto replaces = [&](int dir) {
        return is_same(dir, image_dir) ||
               (is_local(dir) && is_images_of(image_dir, read_owner(dir)));
    };
    const auto refuse = [&](const std::string& path, const std::string& which) {
        throw Error(Errc::bad_argument, "the parent " + path + " is built on what is in " + which +
                                            ", and the dump would replace that: use another "
                                            "directory");
    };
    if (is_same(parent.get(), image_dir))
        refuse(directory_path(parent.get()), "the image directory");
    Lineage chain = Lineage::above(stored_directory(parent.get()).get());
    for (std::uint32_t depth = 1;; ++depth) {
        try {
            chain.directory(depth);
        } catch (const Error&) { // its end, or what choose_parent() tells if it is needed
            return;
        }
        if (replaces(chain.directory(depth)))
            refuse(chain.path(1), chain.path(depth));
    }
}

void refuse_needed_by_local(const Config& config, int image_dir) {
    Id here;
    try {
        here = read_manifest(image_dir).checkpoint_id;
    } catch (const Error&) { // nothing is there that another could need
        return;
    }
    const std::string& path = config.arena.path;
    const UniqueFd arena(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    try {
        if (!arena)
            return;
        require_arena(arena.get(), path);
    } catch (const Error&) { // no dump can have written there
        return;
    }
    for (const std::string& name : names_in(arena.get())) {
        const UniqueFd child(
            ::openat(arena.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
        std::string images;
        try {
            if (!child || !is_built_on(child.get(), image_dir, here) || is_left(child.get()))
                continue;
            images = read_owner(child.get()).images;
        } catch (const Error&) { // it could not be drained anyway
            continue;
        }
        refuse_needed(images, directory_path(image_dir), directory_path(child.get()));
    }
}

// A checkpoint that is there already needs its link until its files are removed.
ParentChoice choose_parent(const Config& config, int image_dir, Lineage& lineage,
                           const ContainerStore* store, SealedDump* sealed) {
    const int own = lineage.directory(0);
    const std::string before = linked_to(own);
    try {
        ParentChoice choice = choose(config, image_dir, lineage, store, sealed);
        if (!choice.index)
            remove_link(own);
        return choice;
    } catch (...) {
        if (linked_to(own) != before) {
            ::unlinkat(own, kParentLink, 0);
            if (!before.empty())
                static_cast<void>(::symlinkat(before.c_str(), own, kParentLink));
        }
        throw;
    }
}

} // namespace gpustasis
