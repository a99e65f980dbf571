// SPDX-License-Identifier: Apache-2.0
#include "cuda_plugin/arena_dump.hpp"

#include "core/arena.hpp"
#include "core/error.hpp"
#include "core/file.hpp"
#include "core/lineage.hpp"
#include "core/manifest.hpp"
#include "core/random_id.hpp"
#include "cuda_plugin/arena_output.hpp"
#include "cuda_plugin/early_images.hpp"
#include "cuda_plugin/host.hpp"
#include "cuda_plugin/memory_directory.hpp"
#include "device_memory/driver_error.hpp"

#include <fcntl.h>
#include <linux/magic.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/statfs.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <filesystem>
#include <optional>
#include <span>

namespace gpustasis {
namespace {

constexpr int kMarkerPatienceMs = 500;

void require_tmpfs_above(const std::string& path) {
    const std::string above = std::filesystem::path(path).parent_path();
    struct statfs system {};
    if (::statfs(above.c_str(), &system) != 0)
        throw io_error("arena: cannot examine " + above, errno);
    if (system.f_type != TMPFS_MAGIC)
        throw Error(Errc::bad_argument, "arena = \"" + path + "\": it is not there, and " + above +
                                            " is not on a tmpfs: make one with gpustasis arena "
                                            "create");
}

void make_with_those_above(const std::string& path) {
    const std::string above = std::filesystem::path(path).parent_path();
    if (::access(above.c_str(), F_OK) != 0 && errno == ENOENT && above.size() > 1)
        make_with_those_above(above);
    require_tmpfs_above(path);
    if (::mkdir(path.c_str(), S_IRWXU) != 0 && errno != EEXIST)
        throw io_error("arena: cannot make " + path, errno);
}

/// Written under another name and renamed: nobody reads half of it. Not brought to the disk: without the memory that
/// it leads to it is worth nothing.
UniqueFd put_text(int directory, const std::string& name, const std::string& text) {
    const std::string part = PartFile::part_name(name);
    if (::unlinkat(directory, part.c_str(), 0) != 0 && errno != ENOENT)
        throw io_error("cannot remove the old " + part, errno);
    UniqueFd file(::openat(directory, part.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC,
                           S_IRUSR | S_IWUSR));
    if (!file)
        throw io_error("cannot make " + part, errno);
    write_at(file.get(), 0, std::as_bytes(std::span(text)));
    if (::flock(file.get(), LOCK_EX | LOCK_NB) != 0)
        throw io_error("cannot lock " + part, errno);
    if (::renameat(directory, part.c_str(), directory, name.c_str()) != 0)
        throw io_error("cannot rename " + part, errno);
    return file;
}

} // namespace

void refuse_with_arena(const Config& config) {
    const auto refuse = [](const std::string& key, const std::string& why) {
        throw Error(Errc::unsupported, "tier = \"ram\": not together with " + key + ": " + why);
    };
    if (config.is_packed() && config.recipients.empty())
        refuse("layout = \"packed\"", "CRIU's images are not packed when a checkpoint is drained");
    if (!config.recipients.empty())
        refuse("recipients", "nothing is sealed when a checkpoint is drained");
    if (!config.sign.empty())
        refuse("sign", "the files of the checkpoint are not there yet; sign it when it is drained, "
                       "with gpustasis sign");
    if (config.incremental)
        refuse("incremental", "an engine takes the image directory away before it is drained");
    if (!config.externalize && config.cpu_memory == CpuMemory::criu)
        refuse("externalize = false", "all memory is in CRIU's images then");
}

UniqueFd open_arena(const std::string& path) {
    const auto open = [&path] {
        return UniqueFd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    };
    UniqueFd arena = open();
    if (!arena && errno == ENOENT) {
        make_with_those_above(path);
        arena = open();
    }
    if (!arena)
        throw io_error("arena: cannot open " + path, errno);
    try {
        require_arena(arena.get(), path);
    } catch (const Error& e) {
        throw Error(e, std::string("arena: ") + e.what());
    }
    return arena;
}

namespace {

bool is_there(int directory, const char* name) {
    return ::faccessat(directory, name, F_OK, AT_SYMLINK_NOFOLLOW) == 0;
}

// CRIU writes its inventory last: there is a checkpoint, and only in memory yet. Throws Error where
// that cannot be told.
bool is_local(int image_dir) {
    if (is_there(image_dir, kManifestName) || !is_there(image_dir, kInventoryImage))
        return false;
    const std::optional<ArenaMarker> marker = find_marker(image_dir);
    if (!marker || is_lost(*marker))
        return false;
    // One that was emptied has no owner either, which is no reason to refuse.
    const std::string manifest = marker->directory + "/" + kManifestName;
    if (::faccessat(AT_FDCWD, manifest.c_str(), F_OK, AT_SYMLINK_NOFOLLOW) != 0 && errno == ENOENT)
        return false;
    return is_there(stored_directory(image_dir).get(), kManifestName);
}

UniqueFd open_marker(int image_dir, const std::string& name) {
    for (;;) {
        UniqueFd marker(
            ::openat(image_dir, kArenaMarker, O_RDWR | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC));
        if (!marker && errno == ENOENT)
            return {};
        if (!marker)
            throw io_error("cannot open " + name, errno);
        if (!lock_file(marker.get(), LOCK_EX, kMarkerPatienceMs, name))
            throw Error(Errc::unsupported,
                        name + " is locked: another dump, or a drain, is at work in that "
                               "directory; use another, or wait until it has ended");
        struct stat status {};
        if (::fstat(marker.get(), &status) != 0)
            throw io_error("cannot examine " + name, errno);
        if (status.st_nlink != 0) // else another one lies there by now
            return marker;
    }
}

} // namespace

UniqueFd lock_marker(int image_dir) {
    const std::string path = directory_path(image_dir);
    UniqueFd marker = open_marker(image_dir, path + "/" + kArenaMarker);
    if (!marker)
        return marker;
    try {
        if (!is_local(image_dir))
            return marker;
    } catch (const Error& e) {
        throw Error(e, "whether " + path +
                           " holds a checkpoint that is only in memory cannot be "
                           "told, and a dump into it would remove it: " +
                           e.what());
    }
    throw Error(Errc::unsupported,
                path +
                    " holds a checkpoint that is only in memory yet, and that a dump into "
                    "it would remove: drain it (gpustasis drain " +
                    path + "), give it up (gpustasis arena discard " + path +
                    "), or use another directory");
}

void remove_marker(int image_dir) {
    const UniqueFd marker = lock_marker(image_dir);
    if (marker && ::unlinkat(image_dir, kArenaMarker, 0) != 0 && errno != ENOENT)
        throw io_error("cannot remove the old " + directory_path(image_dir) + "/" + kArenaMarker,
                       errno);
}

ArenaDump::ArenaDump(const ArenaConfig& config, int image_dir)
    : arena_(open_arena(config.path)), image_dir_(image_dir), id_(random_id()),
      room_(config, arena_.get(), id_text(id_)) {
    const std::string name = id_text(id_);
    path_ = directory_path(arena_.get()) + "/" + name;
    if (::mkdirat(arena_.get(), name.c_str(), S_IRWXU) != 0)
        throw io_error("arena: cannot make " + path_, errno);
    directory_ = UniqueFd(
        ::openat(arena_.get(), name.c_str(), O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC));
    if (!directory_ || ::flock(directory_.get(), LOCK_SH | LOCK_NB) != 0)
        throw io_error("arena: cannot open and lock " + path_, errno);
    struct stat images {};
    if (::fstat(image_dir, &images) != 0)
        throw io_error("cannot examine the image directory", errno);
    try {
        put_text(directory_.get(), kArenaOwner,
                 owner_text({.checkpoint_id = id_,
                             .boot_id = this_boot(),
                             .time = static_cast<std::uint64_t>(::time(nullptr)),
                             .device = images.st_dev,
                             .inode = images.st_ino,
                             .limit = limit_of(config),
                             .pool = config.pool,
                             .images = directory_path(image_dir)}));
    } catch (const Error&) {
        remove();
        throw;
    }
}

void ArenaDump::mark() {
    struct stat arena {};
    if (::fstat(arena_.get(), &arena) != 0)
        throw io_error("cannot examine the arena", errno);
    marker_ = put_text(image_dir_, kArenaMarker,
                       marker_text({.checkpoint_id = id_,
                                    .boot_id = this_boot(),
                                    .directory = path_,
                                    .device = arena.st_dev,
                                    .inode = arena.st_ino}));
}

WriteResult ArenaDump::write(const std::string& name, const ImageInfo& info, MemorySource& memory,
                             const WriteOptions& options) {
    std::int64_t added = 0;
    return write(name, options.alignment, 0, added,
                 [&](ImageOutput& output) { return write_image(output, info, memory, options); });
}

WriteResult ArenaDump::write(const std::string& name, std::uint32_t alignment, std::uint64_t most,
                             std::int64_t& added,
                             const std::function<WriteResult(ImageOutput&)>& write) {
    try {
        room_.prepare();
        ArenaOutput output(room_, arena_.get(), directory_.get(), name, alignment);
        output.reserve(most);
        WriteResult written = write(output);
        added = output.added();
        return written;
    } catch (const DriverError&) {
        throw;
    } catch (const Error& e) {
        throw Error(e, path_ + "/" + name + ": " + e.what());
    }
}

void ArenaDump::complete() noexcept {
    ::unlinkat(directory_.get(), kArenaReserved, 0);
}

void ArenaDump::remove() noexcept {
    try {
        if (marker_ && ::unlinkat(image_dir_, kArenaMarker, 0) != 0 && errno != ENOENT)
            throw io_error(std::string("cannot remove ") + kArenaMarker, errno);
        for (const std::string& name : names_in(directory_.get()))
            if (::unlinkat(directory_.get(), name.c_str(), 0) != 0)
                throw io_error("cannot remove " + path_ + "/" + name, errno);
        if (::unlinkat(arena_.get(), id_text(id_).c_str(), AT_REMOVEDIR) != 0)
            throw io_error("cannot remove " + path_, errno);
    } catch (const Error& e) {
        host::warn(std::string("what this dump has left in the arena takes memory: ") + e.what());
    }
}

} // namespace gpustasis
