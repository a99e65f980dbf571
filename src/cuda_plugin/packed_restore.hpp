// SPDX-License-Identifier: Apache-2.0
/// CRIU's images of a packed checkpoint, for a restore.
#pragma once

#include "core/manifest.hpp"
#include "core/unique_fd.hpp"
#include "cuda_plugin/config.hpp"
#include "seal/sealed_checkpoint.hpp"

namespace gpustasis {

/// Before criu reads anything but the inventory: a directory in memory with what the pack of `image_dir`
/// holds, all of which has been checked. None if `manifest` knows of no pack: the images are where criu
/// looks. Throws Error: corrupt_data, also if there is a pack and should be none, or is another;
/// unsupported; io.
UniqueFd unpack_images(const Config& config, int image_dir, const Manifest& manifest);

/// The same of a sealed checkpoint that holds CRIU's images. Throws Error: corrupt_data; io.
UniqueFd unseal_images(int image_dir, const seal::SealedCheckpoint& sealed);

} // namespace gpustasis
