// SPDX-License-Identifier: Apache-2.0
/// The checkpoints of one container that later ones are built on. Engines move and delete image
/// directories as they please, so our files of each are kept here as well.
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"

#include <string>

namespace gpustasis {

inline constexpr const char* kStoreBase = "/var/lib"; ///< stores are in gpustasis/containers below

/// BASE/gpustasis/containers/ID: one directory per checkpoint, named by its id in hex, and the link
/// `newest`. It is used by one dump at a time.
class ContainerStore {
public:
    /// Of container `id`; made if it is not there. What a killed dump has left half done is
    /// removed. Throws Error: io, also if another dump of this container is under way; bad_argument
    /// if others could write in it.
    explicit ContainerStore(const std::string& id, const std::string& base = kStoreBase);

    /// The newest checkpoint; no descriptor if there is none. Throws Error: io; corrupt_data if
    /// `newest` is no name of a checkpoint.
    UniqueFd newest() const;

    /// Keep our files of the checkpoint `id` in `image_dir`, which is complete: by hard links, or
    /// by copies where another file system is. It is the newest from then on. On an exception the
    /// store is as before. Throws Error: io.
    void keep(int image_dir, const Id& id) const;

    const std::string& path() const noexcept { return path_; }

private:
    std::string path_;
    UniqueFd directory_;
    UniqueFd lock_;
};

} // namespace gpustasis
