/// Everything of an image file but the chunk data: header, metadata, index and trailer.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"

#include <cstdint>

namespace gpustasis {

/// What writing the frame makes known.
struct FrameResult {
    std::uint64_t file_size = 0;
    Id digest{};
};

/// Write the frame around the chunk data in `fd`, which ends at `data_end`, padding included. `info` has
/// passed format::check_info(); `index` holds a packed entry for each chunk. Padding is never
/// written: it is what the file has where nothing was put. Throws Error: io.
FrameResult write_frame(int fd, const ImageInfo& info, std::uint32_t alignment,
                        std::uint64_t data_end, Bytes index);

} // namespace gpustasis
