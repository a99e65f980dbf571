// SPDX-License-Identifier: Apache-2.0
#include "seal/sealed_format.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/hash.hpp"
#include "core/sealed_block.hpp"

#include <algorithm>
#include <bit>
#include <charconv>
#include <system_error>
#include <utility>

namespace gpustasis::seal {
namespace {

// Bits of required_features, of sealed files only.
constexpr std::uint64_t kSingle = 1U << 4;
constexpr std::uint64_t kOthers = 1U << 5;

constexpr format::BlockKind kHeader{"\x93GPUSSL\n", kSealedHeaderSize,
                                    "not the sealed file of a checkpoint: wrong magic",
                                    "damaged header of a sealed file", kSingle | kOthers};
constexpr std::size_t kHeaderReserved = 56;
constexpr std::size_t kEntryFixed = 24;
constexpr std::size_t kEndReserved = 24;
constexpr std::size_t kOtherSize = 24;

constexpr const char* kOtherBegin = "gpustasis-sealed-";
constexpr const char* kOtherEnd = ".img";

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

std::string sealed_name(std::uint32_t file_id) {
    return file_id == kSealedFile ? kSealedName : kOtherBegin + std::to_string(file_id) + kOtherEnd;
}

std::uint32_t sealed_file_id(std::string_view name) noexcept {
    if (name == kSealedName)
        return kSealedFile;
    const std::string_view begin = kOtherBegin;
    const std::string_view end = kOtherEnd;
    if (!name.starts_with(begin) || !name.ends_with(end) ||
        name.size() <= begin.size() + end.size())
        return 0;
    std::uint32_t id = 0;
    const char* const first = name.data() + begin.size();
    const char* const last = name.data() + name.size() - end.size();
    const auto [at, error] = std::from_chars(first, last, id);
    const bool is_canonical = error == std::errc{} && at == last && *first != '0';
    return is_canonical && id >= kFirstOther && id <= kMaxFileId ? id : 0;
}

bool can_be_sealed(const std::string& name) {
    return !name.empty() && name != "." && name != ".." && name.size() <= kMaxNameSize &&
           name.find('/') == std::string::npos && name.find('\0') == std::string::npos &&
           sealed_file_id(name) == 0 && name != kEnvelopeName;
}

std::vector<std::byte> encode_header(const SealedHeader& header) {
    const std::uint64_t features =
        (header.is_single ? kSingle : 0) | (header.lists_others ? kOthers : 0);
    FieldWriter out = format::begin_block(kHeader, features, kSealedHeaderSize);
    out.append(header.sealed_id);
    out.number(header.frame_size);
    out.number(header.file_id);
    out.reserved(kHeaderReserved);
    return format::seal(std::move(out));
}

SealedHeader decode_header(Bytes bytes) {
    format::OpenBlock block = format::open_block(bytes, kHeader);
    SealedHeader header;
    header.is_single = (block.required_features & kSingle) != 0;
    header.lists_others = (block.required_features & kOthers) != 0;
    header.sealed_id = block.fields.id();
    header.frame_size = block.fields.number<std::uint32_t>();
    header.file_id = block.fields.number<std::uint32_t>();
    block.fields.reserved(kHeaderReserved);
    if (header.frame_size < kMinSealedFrame || header.frame_size > kMaxSealedFrame ||
        !std::has_single_bit(header.frame_size))
        corrupt("frame size " + std::to_string(header.frame_size) + " is out of bounds");
    if (header.file_id < kSealedFile || header.file_id > kMaxFileId)
        corrupt("file number " + std::to_string(header.file_id) + " is not that of a sealed file");
    if (header.file_id != kSealedFile && (!header.is_single || header.lists_others))
        corrupt("file number " + std::to_string(header.file_id) +
                " is not of the kind that such a sealed file is");
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

std::vector<std::byte> encode_index(const SealedIndex& index) {
    FieldWriter out(index.others.size() * kOtherSize);
    for (const SealedEntry& entry : index.entries)
        out.append(encode_entry(entry));
    for (const OtherFile& other : index.others) {
        out.number(other.file_id);
        out.reserved(sizeof(std::uint32_t));
        out.append(other.end_tag);
    }
    return out.take();
}

SealedIndex decode_index(Bytes bytes, const SealedEnd& end) {
    // Each takes more than kEntryFixed bytes of what is at hand, so `count` costs no more than that.
    const std::uint64_t count = end.file_count;
    if (count > kMaxSealedFiles || end.other_count > kMaxFileId ||
        count * kEntryFixed + end.other_count * kOtherSize > bytes.size())
        corrupt("the index is too short for its " + std::to_string(count) + " entries");
    SealedIndex index;
    std::vector<SealedEntry>& entries = index.entries;
    entries.reserve(count);
    FieldReader fields(bytes);
    std::size_t used = 0;
    for (std::uint64_t number = 0; number < count; ++number) {
        entries.push_back(take_entry(fields));
        used += entry_size(entries.back());
        if (number > 0 && entries[number - 1].name >= entries[number].name)
            corrupt("names in the index are not in ascending order");
    }
    for (std::uint64_t number = 0; number < end.other_count; ++number) {
        OtherFile other;
        other.file_id = fields.number<std::uint32_t>();
        fields.reserved(sizeof(std::uint32_t));
        std::ranges::copy(fields.take(other.end_tag.size()), other.end_tag.begin());
        const std::uint32_t least =
            index.others.empty() ? kFirstOther : index.others.back().file_id + 1;
        if (other.file_id < least || other.file_id > kMaxFileId)
            corrupt("numbers of other files in the index are out of bounds or order");
        index.others.push_back(other);
    }
    if (used + end.other_count * kOtherSize != bytes.size())
        corrupt("the index is longer than its entries");
    return index;
}

std::vector<std::byte> encode_end(const SealedEnd& end) {
    FieldWriter out(kEndSize);
    out.number(end.content_size);
    out.number(end.index_size);
    out.number(end.file_count);
    out.number(end.file_size);
    out.number(end.other_count);
    out.reserved(kEndReserved);
    return out.take();
}

SealedEnd decode_end(Bytes bytes, const SealedHeader& header, std::uint64_t file_size) {
    FieldReader fields(bytes);
    SealedEnd end;
    end.content_size = fields.number<std::uint64_t>();
    end.index_size = fields.number<std::uint64_t>();
    end.file_count = fields.number<std::uint64_t>();
    end.file_size = fields.number<std::uint64_t>();
    end.other_count = fields.number<std::uint64_t>();
    fields.reserved(kEndReserved);
    if (end.content_size > kMaxContentSize || end.index_size > kMaxIndexSize ||
        end.file_count > kMaxSealedFiles || end.other_count > kMaxFileId ||
        (end.other_count != 0 && !header.lists_others) || (header.is_single && end.file_count != 1))
        corrupt("the end of the sealed file has a number out of bounds");
    const std::uint32_t frame_size = header.frame_size;
    const std::uint64_t index_at = end_of_frames(kSealedHeaderSize, end.content_size, frame_size);
    const std::uint64_t end_at = end_of_frames(index_at, end.index_size, frame_size);
    if (end.file_size != end_at + kFrameOverhead + kEndSize || end.file_size != file_size)
        corrupt("the sealed file has " + std::to_string(file_size) + " bytes and says " +
                std::to_string(end.file_size));
    return end;
}

} // namespace gpustasis::seal
