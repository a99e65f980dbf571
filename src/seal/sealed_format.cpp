// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_format.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/hash.hpp"
#include "core/sealed_block.hpp"

#include <algorithm>
#include <bit>
#include <utility>

namespace gpustasis::seal {
namespace {

constexpr format::BlockKind kHeader{"\x93GPUSSL\n", kSealedHeaderSize,
                                    "not the sealed file of a checkpoint: wrong magic",
                                    "damaged header of a sealed file"};
constexpr std::size_t kHeaderReserved = 56;
constexpr std::size_t kEntryFixed = 24;
constexpr std::size_t kEndReserved = 32;

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

SealedEntry take_entry(FieldReader& fields) {
    SealedEntry entry;
    const auto name_size = fields.number<std::uint16_t>();
    entry.mode = fields.number<std::uint16_t>();
    fields.reserved(sizeof(std::uint32_t));
    entry.size = fields.number<std::uint64_t>();
    entry.mtime_ns = fields.number<std::uint64_t>();
    const Bytes name = fields.take(name_size);
    entry.name.assign(reinterpret_cast<const char*>(name.data()), name.size());
    if (!can_be_sealed(entry.name))
        corrupt("an entry has a name that no file of a checkpoint has");
    if ((entry.mode & ~kModeBits) != 0 || entry.size > kMaxContentSize)
        corrupt("entry of " + entry.name + ": mode or size out of bounds");
    return entry;
}

} // namespace

bool can_be_sealed(const std::string& name) {
    return !name.empty() && name != "." && name != ".." && name.size() <= kMaxNameSize &&
           name.find('/') == std::string::npos && name.find('\0') == std::string::npos &&
           name != kSealedName && name != kEnvelopeName;
}

std::vector<std::byte> encode_header(const SealedHeader& header) {
    FieldWriter out = format::begin_block(kHeader, 0, kSealedHeaderSize);
    out.append(header.sealed_id);
    out.number(header.frame_size);
    out.number(kSealedFile);
    out.reserved(kHeaderReserved);
    return format::seal(std::move(out));
}

SealedHeader decode_header(Bytes bytes) {
    format::OpenBlock block = format::open_block(bytes, kHeader);
    if (block.required_features != 0)
        throw Error(Errc::unsupported, "sealed file needs a feature that this build does not have");
    SealedHeader header;
    header.sealed_id = block.fields.id();
    header.frame_size = block.fields.number<std::uint32_t>();
    const auto file_id = block.fields.number<std::uint32_t>();
    block.fields.reserved(kHeaderReserved);
    if (header.frame_size < kMinSealedFrame || header.frame_size > kMaxSealedFrame ||
        !std::has_single_bit(header.frame_size))
        corrupt("frame size " + std::to_string(header.frame_size) + " is out of bounds");
    if (file_id != kSealedFile)
        corrupt("file number " + std::to_string(file_id) + " is not that of a sealed file");
    return header;
}

std::array<std::byte, kFrameHeaderSize> encode_frame_header(const FrameHeader& header) {
    FieldWriter out(kFrameHeaderSize);
    out.number(header.number);
    out.number(header.plain_size);
    out.number(static_cast<std::uint8_t>(header.kind));
    out.reserved(3);
    std::array<std::byte, kFrameHeaderSize> bytes{};
    std::ranges::copy(out.bytes(), bytes.begin());
    return bytes;
}

std::size_t entry_size(const SealedEntry& entry) noexcept {
    return kEntryFixed + entry.name.size();
}

std::vector<std::byte> encode_entry(const SealedEntry& entry) {
    FieldWriter out(entry_size(entry));
    out.number(static_cast<std::uint16_t>(entry.name.size()));
    out.number(static_cast<std::uint16_t>(entry.mode & kModeBits));
    out.reserved(sizeof(std::uint32_t));
    out.number(entry.size);
    out.number(entry.mtime_ns);
    out.append(std::as_bytes(std::span(entry.name)));
    return out.take();
}

std::vector<SealedEntry> decode_index(Bytes bytes, std::uint64_t count) {
    // Each takes more than kEntryFixed bytes of what is at hand, so `count` costs no more than that.
    if (count > kMaxSealedFiles || count * kEntryFixed > bytes.size())
        corrupt("the index is too short for its " + std::to_string(count) + " entries");
    std::vector<SealedEntry> entries;
    entries.reserve(count);
    FieldReader fields(bytes);
    std::size_t used = 0;
    for (std::uint64_t number = 0; number < count; ++number) {
        entries.push_back(take_entry(fields));
        used += entry_size(entries.back());
        if (number > 0 && entries[number - 1].name >= entries[number].name)
            corrupt("names in the index are not in ascending order");
    }
    if (used != bytes.size())
        corrupt("the index is longer than its entries");
    return entries;
}

std::vector<std::byte> encode_end(const SealedEnd& end) {
    FieldWriter out(kEndSize);
    out.number(end.content_size);
    out.number(end.index_size);
    out.number(end.file_count);
    out.number(end.file_size);
    out.reserved(kEndReserved);
    return out.take();
}

SealedEnd decode_end(Bytes bytes, std::uint32_t frame_size, std::uint64_t file_size) {
    FieldReader fields(bytes);
    SealedEnd end;
    end.content_size = fields.number<std::uint64_t>();
    end.index_size = fields.number<std::uint64_t>();
    end.file_count = fields.number<std::uint64_t>();
    end.file_size = fields.number<std::uint64_t>();
    fields.reserved(kEndReserved);
    if (end.content_size > kMaxContentSize || end.index_size > kMaxIndexSize ||
        end.file_count > kMaxSealedFiles)
        corrupt("the end of the sealed file has a number out of bounds");
    const std::uint64_t index_at = end_of_frames(kSealedHeaderSize, end.content_size, frame_size);
    const std::uint64_t end_at = end_of_frames(index_at, end.index_size, frame_size);
    if (end.file_size != end_at + kFrameOverhead + kEndSize || end.file_size != file_size)
        corrupt("the sealed file has " + std::to_string(file_size) + " bytes and says " +
                std::to_string(end.file_size));
    return end;
}

} // namespace gpustasis::seal
