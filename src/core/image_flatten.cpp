// SPDX-License-Identifier: Apache-2.0
#include "core/image_flatten.hpp"

#include "core/error.hpp"
#include "core/image_format.hpp"
#include "core/image_frame.hpp"
#include "core/image_output.hpp"

#include <atomic>
#include <vector>

namespace gpustasis {

struct FlatImageWriter::State {
    State(const ImageReader& image, int dir, const std::string& name);

    std::string name;
    FileOutput file;
    ImageInfo info;
    std::uint32_t alignment;
    std::vector<std::byte> index;
    struct Place {
        std::uint64_t offset = 0; ///< 0: nothing is wanted, or not any more
        std::uint32_t size = 0;
    };
    std::vector<Place> places; ///< by number of the chunk
    std::atomic<std::uint64_t> missing = 0;
    EncodingTotals totals;
    std::uint64_t end;
};

FlatImageWriter::State::State(const ImageReader& image, int dir, const std::string& file_name)
    : name(file_name), file(dir, file_name, IoMode::buffered, image.alignment()),
      info(image.info()), alignment(image.alignment()),
      index(image.chunk_count() * format::kIndexEntrySize), places(image.chunk_count()),
      end(format::align_up(format::kHeaderSize, alignment)) {
    info.parent_id = {};
    info.sources.clear();
    for (std::uint64_t number = 0; number < places.size(); ++number) {
        const ChunkInfo chunk = image.chunk(number);
        format::IndexEntry entry{.plain_hash = chunk.hash,
                                 .offset = 0,
                                 .stored_hash = chunk.stored_hash,
                                 .stored_size = chunk.stored_size,
                                 .encoding = chunk.encoding};
        if (chunk.encoding != Encoding::zero) {
            entry.offset = end;
            places[number] = {.offset = end, .size = chunk.stored_size};
            end = format::align_up(end + chunk.stored_size, alignment);
            ++missing;
        }
        totals.add(entry.encoding, Holder::own, chunk.plain_size, entry.stored_size);
        format::pack_index_entry(entry, MutBytes(index).subspan(number * format::kIndexEntrySize,
                                                                format::kIndexEntrySize));
    }
}

FlatImageWriter::FlatImageWriter(const ImageReader& image, int dir_fd, const std::string& name)
    : state_(std::make_unique<State>(image, dir_fd, name)) {}
FlatImageWriter::FlatImageWriter(FlatImageWriter&&) noexcept = default;
FlatImageWriter::~FlatImageWriter() = default;

void FlatImageWriter::put(std::uint64_t number, Bytes stored) {
    const auto refuse = [&](const char* why) {
        throw Error(Errc::bad_argument,
                    state_->name + ": chunk " + std::to_string(number) + " " + why);
    };
    if (number >= state_->places.size())
        refuse("does not exist");
    State::Place& place = state_->places[number];
    if (place.offset == 0)
        refuse("was put before, or is one of zeros");
    if (place.size != stored.size())
        refuse("has another number of stored bytes");
    state_->file.put(place.offset, stored);
    place.offset = 0;
    --state_->missing;
}

WriteResult FlatImageWriter::finish() {
    if (state_->missing != 0)
        throw Error(Errc::bad_argument, state_->name + ": " + std::to_string(state_->missing) +
                                            " of its chunks were not put");
    const FrameResult frame =
        write_frame(state_->file, state_->info, state_->alignment, state_->end, state_->index);
    state_->file.commit(frame.file_size);
    WriteResult result;
    result.totals = state_->totals;
    result.file_size = frame.file_size;
    result.digest = frame.digest;
    return result;
}

WriteResult flatten_image(const ImageReader& image, int dir_fd, const std::string& name,
                          unsigned threads, const ImageReader::Progress& progress) {
    FlatImageWriter flat(image, dir_fd, name);
    image.visit_stored(
        threads, [&](std::uint64_t number, Bytes stored) { flat.put(number, stored); }, progress);
    return flat.finish();
}

} // namespace gpustasis
