#include "core/image_frame.hpp"

#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_metadata.hpp"

namespace gpustasis {

FrameResult write_frame(int fd, const ImageInfo& info, std::uint32_t alignment,
                        std::uint64_t data_end, Bytes index) {
    const std::vector<std::byte> header =
        format::pack_header({.checkpoint_id = info.checkpoint_id,
                             .parent_id = info.parent_id,
                             .pid = info.pid,
                             .chunk_size = info.chunk_size,
                             .alignment = alignment,
                             .striped = format::has_stripes(info.sources),
                             .hash = {}});
    const std::vector<std::byte> metadata = format::pack_metadata(info);
    format::Trailer trailer;
    trailer.metadata_offset = data_end;
    trailer.metadata_size = metadata.size();
    trailer.metadata_hash = hash128(metadata);
    trailer.index_offset = trailer.metadata_offset + metadata.size();
    trailer.chunk_count = index.size() / format::kIndexEntrySize;
    trailer.index_hash = hash128(index);
    trailer.header_hash = format::hash_at_end(header);
    const std::uint64_t trailer_offset = trailer.index_offset + index.size();
    trailer.file_size = trailer_offset + format::kTrailerSize;
    const std::vector<std::byte> packed_trailer = format::pack_trailer(trailer);

    write_at(fd, 0, header);
    write_at(fd, trailer.metadata_offset, metadata);
    write_at(fd, trailer.index_offset, index);
    write_at(fd, trailer_offset, packed_trailer);
    return {.file_size = trailer.file_size, .digest = format::hash_at_end(packed_trailer)};
}

} // namespace gpustasis
