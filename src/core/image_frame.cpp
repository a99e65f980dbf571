// SPDX-License-Identifier: Apache-2.0
#include "core/image_frame.hpp"

#include "core/chunk_codec.hpp"
#include "core/file.hpp"
#include "core/hash.hpp"
#include "core/image_format.hpp"
#include "core/image_metadata.hpp"
#include "core/sealed_block.hpp"

#include <algorithm>
#include <cstdio>
#include <string>

namespace gpustasis {
namespace {

using format::align_up;

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

// That the parts at the end follow each other without gaps. After this, sizes can be trusted to
// lie in the file.
void check_layout(const format::Trailer& trailer, std::uint32_t alignment, std::uint64_t size) {
    if (trailer.file_size != size)
        corrupt("file is " + std::to_string(size) + " bytes long, but should be " +
                std::to_string(trailer.file_size));
    if (trailer.metadata_size > format::kMaxMetadataSize)
        corrupt("metadata is too large");
    if (trailer.chunk_count > format::kMaxChunks)
        corrupt("too many chunks");
    const std::uint64_t tail = trailer.metadata_size +
                               trailer.chunk_count * format::kIndexEntrySize + format::kTrailerSize;
    const std::uint64_t data_begin = align_up(format::kHeaderSize, alignment);
    if (size < data_begin + tail || trailer.metadata_offset != size - tail ||
        trailer.index_offset != trailer.metadata_offset + trailer.metadata_size)
        corrupt("parts of the file are not where they should be");
}

// Each chunk lies where it must, and no other byte is between header and metadata.
void check_index(ImageFrame& frame) {
    std::uint64_t end = align_up(format::kHeaderSize, frame.alignment);
    for (std::uint64_t number = 0; number < frame.map.count(); ++number) {
        try {
            const format::IndexEntry chunk = frame.entry(number);
            frame.totals.add(chunk.encoding, format::holder_of(chunk.source, frame.info.sources),
                             frame.map.at(number).size, chunk.stored_size);
            if (chunk.encoding == Encoding::zero || chunk.source != 0)
                continue;
            if (chunk.offset != end)
                corrupt("not where it should be in the file");
            end = align_up(end + chunk.stored_size, frame.alignment);
        } catch (const Error& e) {
            frame.blame_chunk(number, e);
        }
    }
    if (end != frame.trailer.metadata_offset)
        corrupt("chunks do not fill the space between header and metadata");
}

} // namespace

ChunkMap::ChunkMap(const std::vector<Region>& regions, std::uint32_t chunk_size)
    : chunk_size_(chunk_size) {
    runs_.reserve(regions.size());
    for (const Region& region : regions) {
        runs_.push_back({count_, region.address, region.length});
        count_ += (region.length + chunk_size - 1) / chunk_size;
        plain_size_ += region.length;
    }
}

ChunkPlace ChunkMap::at(std::uint64_t index) const noexcept {
    const auto after = std::ranges::upper_bound(runs_, index, {}, &Run::first);
    const Run& run = *(after - 1);
    const std::uint64_t offset = (index - run.first) * chunk_size_;
    const std::uint64_t left = run.length - offset;
    return {run.address + offset,
            static_cast<std::uint32_t>(std::min<std::uint64_t>(left, chunk_size_))};
}

FrameResult write_frame(ImageOutput& output, const ImageInfo& info, std::uint32_t alignment,
                        std::uint64_t data_end, Bytes index) {
    const std::vector<std::byte> header =
        format::pack_header({.checkpoint_id = info.checkpoint_id,
                             .parent_id = info.parent_id,
                             .pid = info.pid,
                             .chunk_size = info.chunk_size,
                             .alignment = alignment,
                             .kind = info.kind,
                             .has_cpu_memory = format::has_cpu_memory(info),
                             .has_alike = format::has_alike(info),
                             .of_devices = info.of_devices,
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

    output.put(0, header);
    output.put(trailer.metadata_offset, metadata);
    output.put(trailer.index_offset, index);
    output.put(trailer_offset, packed_trailer);
    return {.file_size = trailer.file_size, .digest = format::hash_at_end(packed_trailer)};
}

// Of an image of `size` bytes that has zeros between `header` and `tail`.
ReadPart read_ends(Bytes header, Bytes tail, std::uint64_t size) {
    return [=](std::uint64_t offset, std::uint64_t length) {
        std::vector<std::byte> part(length);
        const auto copy = [&](Bytes from, std::uint64_t at) {
            const std::uint64_t begin = std::max(at, offset);
            const std::uint64_t end = std::min(at + from.size(), offset + length);
            if (begin < end)
                copy_bytes(from.subspan(begin - at, end - begin), part.data() + (begin - offset));
        };
        copy(header, 0);
        copy(tail, size - tail.size());
        return part;
    };
}

void ImageFrame::blame_chunk(std::uint64_t number, const Error& error) const {
    char address[32];
    std::snprintf(address, sizeof address, "0x%llx",
                  static_cast<unsigned long long>(map.at(number).address));
    throw Error(error, "chunk " + std::to_string(number) + " at " + address + ": " + error.what());
}

ImageFrame read_frame(std::uint64_t size, const ReadPart& read) {
    ImageFrame frame;
    if (size < format::kHeaderSize + format::kTrailerSize)
        corrupt("too short for an image: " + std::to_string(size) + " bytes");
    const format::Header header = format::unpack_header(read(0, format::kHeaderSize));
    frame.trailer = format::unpack_trailer(read(size - format::kTrailerSize, format::kTrailerSize));
    if (frame.trailer.header_hash != header.hash)
        corrupt("header and trailer are of different images");
    frame.alignment = header.alignment;
    check_layout(frame.trailer, frame.alignment, size);

    const std::vector<std::byte> metadata =
        read(frame.trailer.metadata_offset, frame.trailer.metadata_size);
    if (hash128(metadata) != frame.trailer.metadata_hash)
        corrupt("metadata does not match its checksum");
    frame.info.checkpoint_id = header.checkpoint_id;
    frame.info.parent_id = header.parent_id;
    frame.info.pid = header.pid;
    frame.info.chunk_size = header.chunk_size;
    frame.info.kind = header.kind;
    frame.info.of_devices = header.of_devices;
    format::unpack_metadata(metadata, frame.info);
    format::check_info(frame.info, Errc::corrupt_data);
    if (format::has_cpu_memory(frame.info) != header.has_cpu_memory)
        corrupt("kinds of memory and features contradict each other");
    if (format::has_alike(frame.info) != header.has_alike)
        corrupt("sources and features contradict each other");

    frame.map = ChunkMap(frame.info.regions, frame.info.chunk_size);
    if (frame.trailer.chunk_count != frame.map.count())
        corrupt("number of chunks does not follow from the regions");
    frame.index =
        read(frame.trailer.index_offset, frame.trailer.chunk_count * format::kIndexEntrySize);
    if (hash128(frame.index) != frame.trailer.index_hash)
        corrupt("index does not match its checksum");
    check_index(frame);
    const std::uint64_t data_begin = align_up(format::kHeaderSize, frame.alignment);
    if (!is_zero(read(format::kHeaderSize, data_begin - format::kHeaderSize)))
        corrupt("padding after the header is not zero");
    return frame;
}

} // namespace gpustasis
