// SPDX-License-Identifier: Apache-2.0
/// Seals a checkpoint whose images lie in an arena (core/arena.hpp): what was in GPU memory is never on a disk in the
/// clear.
#pragma once

#include "core/image_drain.hpp"
#include "seal/frame_cipher.hpp"
#include "seal/sealed_writer.hpp"

#include <string>
#include <vector>

namespace gpustasis::seal {

/// Seal the images that the manifest in `arena` lists, the manifest, and CRIU's files `names` of `source`, into
/// `target`. The envelope of `key` is there. Each image is a sealed file of its own, written while it is compressed,
/// and complete and durable on return; kSealedName, which lists them, comes last. The images share no chunks.
/// `tell` is told bytes of memory and of files. Throws Error: bad_argument also if the checkpoint is built on another;
/// corrupt_data also if an image in the arena is damaged; as write_sealed().
SealedSizes seal_from_arena(FreshKey& key, int arena, int source, std::vector<std::string> names,
                            int target, const DrainOptions& options, const SealProgress& tell = {});

} // namespace gpustasis::seal
