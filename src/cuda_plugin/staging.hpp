// SPDX-License-Identifier: Apache-2.0
/// Finding the memory that the driver staged GPU memory in.
#pragma once

#include "core/image_info.hpp"
#include "tracee/task_maps.hpp"

#include <cstdint>
#include <vector>

namespace gpustasis {

/// What is smaller stays with CRIU: a driver stages in multiples of 2 MiB, and what its threads
/// allocate besides in so small pieces is theirs.
inline constexpr std::uint64_t kMinStaging = std::uint64_t{1} << 20;

/// Readable anonymous memory, private or shared, at addresses that held no such memory before:
/// unmapped, reserved (PROT_NONE) or a device until then. Left to CRIU, because threads of the task
/// may use it at any time: the heap, what looks like an arena of malloc (at a multiple of 64 MiB
/// with the rest of those 64 MiB reserved) or like the stack of a thread (above a new guard), memory
/// that holds one of the addresses `in_use`, what is smaller than kMinStaging, and of shared memory
/// what does not fill 2 MiB of its file from a multiple of them on. Both lists ascend
/// by address, as read_maps gives them. Ascending by address; neighbours that are mapped alike are one
/// region.
std::vector<Region> find_staging(const std::vector<Mapping>& before,
                                 const std::vector<Mapping>& after,
                                 const std::vector<std::uint64_t>& in_use);

} // namespace gpustasis
