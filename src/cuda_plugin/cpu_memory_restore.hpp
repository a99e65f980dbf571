// SPDX-License-Identifier: Apache-2.0
/// The CPU memory of a tree in one restore: from images of ours into tasks that lack it still.
#pragma once

#include "core/image_reader.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <cstdint>
#include <map>
#include <vector>

namespace gpustasis {

class CpuMemoryRestore {
public:
    /// An image of CPU memory that the manifest lists, checked but for its chunks.
    void add(std::uint32_t pid, ImageReader image);

    bool empty() const noexcept { return images_.empty(); }

    /// All tasks stand, and none has run: fill those that have an image. Each image must be that of exactly
    /// one. Throws Error: corrupt_data, io.
    void fill(const std::vector<pid_t>& tree, unsigned threads, Statistics& statistics);

private:
    std::map<std::uint32_t, ImageReader> images_; ///< by pid in the innermost namespace
};

} // namespace gpustasis
