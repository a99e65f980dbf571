// SPDX-License-Identifier: Apache-2.0
/// Which checkpoint a dump builds on.
#pragma once

#include "core/lineage.hpp"
#include "core/parent_index.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/container_store.hpp"
#include "cuda_plugin/sealed_dump.hpp"

#include <optional>
#include <string>

namespace gpustasis {

/// What was chosen, and in words for the log and the statistics.
struct ParentChoice {
    std::optional<ParentIndex> index; ///< none: the dump is a full one
    std::string directory;            ///< the parent's, or empty
    std::string reason;               ///< why it is a full one, or empty
    std::optional<Lineage> held;      ///< of a parent that is local: a lock on its image directory
};

/// The directory that the key `parent` names; else, with a `store`, the newest that it has; else
/// the first with a manifest of ours along CRIU's own `parent` links (criu dump --prev-images-dir);
/// else none. `held` is to last to the end of the dump: a local one may be drained meanwhile, and before
/// the dump has left its marker nothing else tells whoever removes the image directory that it is needed.
/// Makes the parent link of the checkpoint that `lineage` is of, or removes what an
/// earlier dump left; `lineage` keeps the chain's files open. A chain that would get longer than
/// config.max_chain is not continued. With `sealed`, the dump is for recipients: its parent is sealed as well, is
/// opened by config.private_key, and `sealed` is built on it from then on. A parent that was named and differs
/// in that is refused, one that was found is not continued. Throws Error: io, corrupt_data, unsupported; bad_argument if
/// what was named cannot serve, unsupported if it is local (core/arena.hpp) and the dump is not. `image_dir`: criu's,
/// which `lineage` is of, or, of a dump into memory, of its directory in the arena.
ParentChoice choose_parent(const Config& config, int image_dir, Lineage& lineage,
                           const ContainerStore* store, SealedDump* sealed);

/// Before anything of an earlier dump is removed from `image_dir`: throws Error: bad_argument if the parent that
/// `config` names, or CRIU's link leads to, is built on that, or is that, whether it was drained or not.
void refuse_circle(const Config& config, int image_dir);

/// The same: throws Error: unsupported if a checkpoint in the arena that `config` names is not drained, and built on the
/// checkpoint in `image_dir`, which was drained there, or on one that is: it could never be drained. Where that arena
/// cannot be opened, or is none, nothing is known to need it. io if its names cannot be read.
void refuse_needed_by_local(const Config& config, int image_dir);

} // namespace gpustasis
