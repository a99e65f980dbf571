// SPDX-License-Identifier: Apache-2.0
/// Checkpoints whose images lie in memory first: in a directory of an arena, on a tmpfs, until they are drained into
/// the image directory (docs/format.md, "In memory first").
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace gpustasis {

/// In an image directory: says where the images and the manifest are that it lacks.
inline constexpr const char* kArenaMarker = "gpustasis-arena";
/// In the directory of a checkpoint in an arena: says whose it is.
inline constexpr const char* kArenaOwner = "owner";
/// The same: it is drained, or given up, and what is in the image directory needs nothing of it.
inline constexpr const char* kArenaOver = ".over";

/// What the marker says.
struct ArenaMarker {
    Id checkpoint_id{};
    std::string boot_id;      ///< as this_boot(); the arena is gone in any other
    std::string directory;    ///< absolute path of the checkpoint's directory in the arena
    std::uint64_t device = 0; ///< st_dev of the arena; 0: not said, by an older version
    std::uint64_t inode = 0;  ///< st_ino of the arena

    bool operator==(const ArenaMarker&) const = default;
};

/// What the file `owner` says.
struct ArenaOwner {
    Id checkpoint_id{};
    std::string boot_id;
    std::uint64_t time = 0;   ///< of the dump, s since 1970
    std::uint64_t device = 0; ///< st_dev of the image directory
    std::uint64_t inode = 0;  ///< st_ino of the image directory
    std::uint64_t limit = 0;  ///< bytes that the arena may hold
    std::uint64_t pool = 0;   ///< of these, bytes of files to be written into again; 0: automatic
    std::string images;       ///< path of the image directory, as the dump saw it

    bool operator==(const ArenaOwner&) const = default;
};

/// /proc/sys/kernel/random/boot_id without its end of line. Throws Error: io.
std::string this_boot();

/// Their text. Throws Error: bad_argument if a path has an end of line in it, or is not absolute.
std::string marker_text(const ArenaMarker& marker);
std::string owner_text(const ArenaOwner& owner);
/// `name` is for messages. Throws Error: corrupt_data; unsupported of a version that is not known.
ArenaMarker parse_marker(const std::string& text, const std::string& name);
ArenaOwner parse_owner(const std::string& text, const std::string& name);

/// The marker in `image_dir`; nullopt: there is none. Throws Error: io, as parse_marker().
std::optional<ArenaMarker> find_marker(int image_dir);
/// Whether the memory that it leads to is gone: this host was booted since, or its arena has lost that directory. Throws
/// Error: io if that cannot be told, as of an arena that is not seen from here.
bool is_lost(const ArenaMarker& marker);
/// Of a directory of an arena. Throws Error: io (also if there is none), as parse_owner().
ArenaOwner read_owner(int directory);

/// Check that `directory`, opened at `path`, is on a tmpfs, belongs to root or this user, and has mode 0700.
/// Throws Error: bad_argument, which says what it is instead; io.
void require_arena(int directory, const std::string& path);

/// Where the manifest and the images of ours of the checkpoint in `image_dir` are, opened anew: the one place that
/// decides it. There, if it has a manifest (it is durable), or no marker; else in the arena directory that the marker
/// names (it is local). Throws Error: io if that is gone, which says that the checkpoint is lost; bad_argument as
/// require_arena(); corrupt_data if it is another checkpoint's.
UniqueFd stored_directory(int image_dir);

} // namespace gpustasis
