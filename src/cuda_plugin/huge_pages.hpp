// SPDX-License-Identifier: Apache-2.0
/// Huge pages for the memory that a restore is about to fill.
#pragma once

#include "core/image_info.hpp"
#include "cuda_plugin/config.hpp"
#include "cuda_plugin/task_table.hpp"

namespace gpustasis {

/// Whether this machine is a guest that gives free memory back to its host (virtio balloon with free
/// page reporting). Blocks as large as huge pages are what it gives back, and each is a fault of the
/// host's when it is taken again: there, huge pages made refills two to three times as slow.
bool gives_memory_back() noexcept;

/// Ask for huge pages in the private regions of `info` that can hold one, in the name of the task,
/// if `wish` says so. Each page of staging is touched for the first time by the refill: in pages of
/// 2 MiB that is half the work. Only a wish: nothing depends on whether it is granted. The restore thread of
/// `record` is in a ptrace stop. Returns whether anything was asked. Throws Error: io.
bool ask_for_huge_pages(HugePages wish, TaskRecord& record, const ImageInfo& info);

} // namespace gpustasis
