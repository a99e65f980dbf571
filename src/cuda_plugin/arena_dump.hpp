// SPDX-License-Identifier: Apache-2.0
/// A dump into memory (tier = "ram"): its images and its manifest go into a directory of an arena, without compression
/// and without a disk, and are drained into the image directory when the job runs on.
#pragma once

#include "core/image_info.hpp"
#include "core/image_writer.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/arena_room.hpp"
#include "cuda_plugin/config.hpp"

#include <functional>
#include <string>
#include <vector>

namespace gpustasis {

/// Of an arena: files of drained checkpoints, whose pages are used again.
inline constexpr const char* kArenaPool = "pool";

/// Throws Error: unsupported, naming the key, if `config` asks for what a dump into memory cannot do yet.
void refuse_with_arena(const Config& config);

/// The arena at `path`, made with mode 0700 if it is missing and lies in a tmpfs; directories above it likewise.
/// Throws Error: bad_argument, which says what is wrong, if it is no arena; io.
UniqueFd open_arena(const std::string& path);

/// The marker in `image_dir`, locked: no drain begins and no dump. None: there is none. Throws Error: unsupported if a
/// dump or a drain is at work there, or the checkpoint of the marker is whole: then it is nowhere else; as
/// stored_directory() if that cannot be told; io.
UniqueFd lock_marker(int image_dir);

/// Remove the marker of an earlier dump from `image_dir`. Its directory in the arena stays, for whoever reads there.
/// Throws as lock_marker().
void remove_marker(int image_dir);

class ArenaDump {
public:
    /// Makes the directory of a new checkpoint, with a shared lock on it. `image_dir` stays the caller's, and
    /// open; `config` outlives this. Throws as open_arena().
    ArenaDump(const ArenaConfig& config, int image_dir);
    ArenaDump(const ArenaDump&) = delete;
    ArenaDump& operator=(const ArenaDump&) = delete;

    int directory() const noexcept { return directory_.get(); }
    const Id& id() const noexcept { return id_; }

    /// Leave the marker in the image directory, and hold its lock until the end of this process: no drain takes what
    /// is not finished. Throws Error: io.
    void mark();

    ArenaRoom& room() noexcept { return room_; }

    /// As write_image() into a file of the arena, but that nothing is brought to a disk. Pages of the pool are used
    /// first. Throws as write_image().
    WriteResult write(const std::string& name, const ImageInfo& info, MemorySource& memory,
                      const WriteOptions& options);

    /// The same of an image for chunks of this alignment that `write` puts into the output. Also in a process that was
    /// forked, which has the descriptors; by several threads at once.
    /// `most`: bytes that it may have, for which there is room before `write` is called; 0: that is not known.
    /// `added`: bytes that it has taken from the room, less what it has given to it.
    WriteResult write(const std::string& name, std::uint32_t alignment, std::uint64_t most,
                      std::int64_t& added, const std::function<WriteResult(ImageOutput&)>& write);
    std::vector<int> descriptors() const { return {arena_.get(), directory_.get()}; }

    /// What was written is the whole of it.
    void complete() noexcept;

    /// What was written is not needed, or is no checkpoint: remove it, and the marker.
    void remove() noexcept;

private:
    UniqueFd arena_;
    std::string path_; ///< of `directory_`
    int image_dir_;
    Id id_;
    UniqueFd directory_;
    ArenaRoom room_;
    UniqueFd marker_; ///< none: not marked yet
};

} // namespace gpustasis
