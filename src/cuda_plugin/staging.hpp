/// The memory that the driver staged GPU memory in: finding it, and filling it again.
#pragma once

#include "core/image_info.hpp"
#include "core/image_reader.hpp"
#include "tracee/task_maps.hpp"

#include <sys/types.h>

#include <vector>

namespace gpustasis {

/// Readable anonymous memory, private or shared, at addresses that held no such memory before:
/// unmapped, reserved (PROT_NONE) or a device until then. Both lists ascend by address, as
/// read_maps gives them. Ascending by address; neighbours that are mapped alike are one region.
std::vector<Region> find_staging(const std::vector<Mapping>& before,
                                 const std::vector<Mapping>& after);

/// Check that the task maps every region of `image` as the image says, then put its memory back.
/// Chunks that are zero are left out where the page tables show that no page is there.
/// Throws Error: corrupt_data if a mapping differs or a chunk is damaged, io.
void refill(pid_t pid, const ImageReader& image, unsigned threads);

} // namespace gpustasis
