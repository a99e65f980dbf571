// SPDX-License-Identifier: Apache-2.0
/// Finding a checkpoint by its id, where no link leads to it.
#pragma once

#include "core/image_info.hpp"
#include "core/unique_fd.hpp"

#include <string>

namespace gpustasis {

/// Where checkpoints that others are built on are kept (docs/format.md, "Links").
inline constexpr const char* kStoreRoot = "/var/lib/gpustasis";

/// The directory with the checkpoint `id`, by its manifest: `root`/checkpoints/<id in hex>, else
/// `root`/containers/<any>/<id in hex>; no descriptor if there is none. What cannot be read is not
/// it. That its images are the right ones, their digests tell.
UniqueFd find_checkpoint(const Id& id, const std::string& root = kStoreRoot);

/// For a message: where that looks.
std::string searched_places(const std::string& root = kStoreRoot);

} // namespace gpustasis
