#include "core/image_flatten.hpp"

#include "core/error.hpp"
#include "core/file.hpp"
#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/stripe_file.hpp"

#include <vector>

namespace gpustasis {

WriteResult flatten_image(const ImageReader& image, int dir_fd, const std::string& name,
                          unsigned threads, const ImageReader::Progress& progress) {
    ImageInfo info = image.info();
    info.parent_id = {};
    info.sources.clear();
    const std::uint32_t alignment = image.alignment();

    // All sizes are known beforehand, and so are all places.
    std::vector<std::byte> index(image.chunk_count() * format::kIndexEntrySize);
    std::vector<std::uint64_t> offsets(image.chunk_count());
    EncodingTotals totals;
    std::uint64_t end = format::align_up(format::kHeaderSize, alignment);
    for (std::uint64_t number = 0; number < image.chunk_count(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        format::IndexEntry entry{.plain_hash = chunk.hash,
                                 .offset = 0,
                                 .stored_hash = chunk.stored_hash,
                                 .stored_size = chunk.stored_size,
                                 .encoding = chunk.encoding};
        if (chunk.encoding != Encoding::zero) {
            entry.offset = offsets[number] = end;
            end = format::align_up(end + chunk.stored_size, alignment);
        }
        totals.add(entry.encoding, false, chunk.plain_size, entry.stored_size);
        format::pack_index_entry(entry, MutBytes(index).subspan(number * format::kIndexEntrySize,
                                                                format::kIndexEntrySize));
    }

    PartFile file(dir_fd, name);
    image.visit_stored(
        threads,
        [&](std::uint64_t number, Bytes stored) { write_at(file.fd(), offsets[number], stored); },
        progress);
    const FrameResult frame = write_frame(file.fd(), info, alignment, end, index);
    remove_stripes(dir_fd, name, 1);
    file.commit();
    return {.totals = totals, .file_size = frame.file_size, .digest = frame.digest};
}

} // namespace gpustasis
