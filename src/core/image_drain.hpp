// SPDX-License-Identifier: Apache-2.0
/// Bring the images of a checkpoint that lies in an arena (arena.hpp) into its image directory.
#pragma once

#include "core/direct_io.hpp"
#include "core/image_output.hpp"
#include "core/image_reader.hpp"
#include "core/manifest.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

namespace gpustasis {

struct DrainOptions {
    unsigned threads = 0; ///< as WriteOptions
    bool compress = true; ///< as WriteOptions
    IoMode io = IoMode::automatic;
    std::uint64_t rate =
        0; ///< bytes of the images that are written in a second, at most; 0: no limit
};

/// Write the images that the manifest in `arena` lists to `image_dir`, each complete and durable on return: with the
/// same memory, each chunk checked, and references into the images of `parent`, whose checkpoint is durable; -1: there
/// is no parent. Makes the parent link of `image_dir`. An image refers to others of the checkpoint where that in the
/// arena does. Returns the manifest of what was written, which is for the caller to write.
/// `progress` is told the bytes of memory that were read. Throws Error: corrupt_data if an image in the arena is
/// damaged, or is not the one that its manifest lists; bad_argument if `parent` is not the checkpoint that it is built on; io.
Manifest drain_images(int arena, int image_dir, int parent, const DrainOptions& options,
                      const ImageReader::Progress& progress = {});

/// Where the image `name`, with chunks of this alignment, goes.
using MakeOutput =
    std::function<std::unique_ptr<ImageOutput>(const std::string& name, std::uint32_t alignment)>;

/// The same of a checkpoint that is built on no other, into what `make` gives, where nothing can be referred to: each
/// image holds all of its chunks. Throws Error: bad_argument if it is built on another; as drain_images(), and what
/// `make` and its outputs throw.
Manifest drain_images_into(int arena, const MakeOutput& make, const DrainOptions& options,
                           const ImageReader::Progress& progress = {});

} // namespace gpustasis
