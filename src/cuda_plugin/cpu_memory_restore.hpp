// SPDX-License-Identifier: Apache-2.0
/// The CPU memory of a tree in one restore: from images of ours into tasks that lack it still.
#pragma once

#include "cuda_plugin/restore_images.hpp"
#include "cuda_plugin/statistics.hpp"

#include <sys/types.h>

#include <vector>

namespace gpustasis {

/// All tasks stand, and none has run: fill those that have one of `images`, which are those of CPU
/// memory. Each image must be that of exactly one. Throws Error: corrupt_data, io.
void fill_cpu_memory(const RestoreImages::ByPid& images, const std::vector<pid_t>& tree,
                     unsigned threads, Statistics& statistics);

} // namespace gpustasis
