// SPDX-License-Identifier: Apache-2.0
/// Everything of an image file but the chunk data: header, metadata, index and trailer.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_codec.hpp"
#include "core/error.hpp"
#include "core/image_format.hpp"
#include "core/image_info.hpp"
#include "core/image_output.hpp"

#include <cstdint>
#include <functional>
#include <vector>

namespace gpustasis {

/// The memory one chunk holds.
struct ChunkPlace {
    std::uint64_t address = 0;
    std::uint32_t size = 0;
};

/// Numbers the chunks of a list of regions, as docs/format.md says.
class ChunkMap {
public:
    /// `regions` and `chunk_size` have passed format::check_info().
    ChunkMap(const std::vector<Region>& regions, std::uint32_t chunk_size);

    std::uint64_t count() const noexcept { return count_; }
    /// Memory in all chunks, in bytes.
    std::uint64_t plain_size() const noexcept { return plain_size_; }
    /// `index` is less than count().
    ChunkPlace at(std::uint64_t index) const noexcept;

private:
    struct Run {
        std::uint64_t first = 0; ///< number of the region's first chunk
        std::uint64_t address = 0;
        std::uint64_t length = 0;
    };
    std::vector<Run> runs_;
    std::uint32_t chunk_size_;
    std::uint64_t count_ = 0;
    std::uint64_t plain_size_ = 0;
};

/// What writing the frame makes known.
struct FrameResult {
    std::uint64_t file_size = 0;
    Id digest{};
};

/// Write the frame around the chunk data in `output`, which ends at `data_end`, padding included. `info`
/// has passed format::check_info(); `index` holds a packed entry for each chunk. Padding is never
/// written: it is what the image has where nothing was put. Throws Error: io.
FrameResult write_frame(ImageOutput& output, const ImageInfo& info, std::uint32_t alignment,
                        std::uint64_t data_end, Bytes index);

/// Gives the bytes [offset, offset + size) of an image. Throws Error: io, corrupt_data.
using ReadPart = std::function<std::vector<std::byte>(std::uint64_t offset, std::uint64_t size)>;

/// Of an image of `size` bytes that has zeros between `header` and `tail`, neither longer than that.
ReadPart read_ends(Bytes header, Bytes tail, std::uint64_t size);

/// A frame that was read and found sound.
struct ImageFrame {
    ImageInfo info;
    std::uint32_t alignment = 1;
    format::Trailer trailer;
    std::vector<std::byte> index;
    ChunkMap map{{}, kMinChunkSize};
    EncodingTotals totals;

    /// Throws Error: corrupt_data while the index is not checked, never after.
    format::IndexEntry entry(std::uint64_t number) const {
        return format::unpack_index_entry(
            Bytes(index).subspan(number * format::kIndexEntrySize, format::kIndexEntrySize),
            map.at(number).size, info.sources);
    }
    /// Throw `error` with number and address of a chunk before what it says.
    [[noreturn]] void blame_chunk(std::uint64_t number, const Error& error) const;
};

/// The frame of an image of `size` bytes. Checks every checksum and bound, and that the parts fill the
/// file with no gap. Throws Error: io, corrupt_data, unsupported.
ImageFrame read_frame(std::uint64_t size, const ReadPart& read);

} // namespace gpustasis
