// SPDX-License-Identifier: Apache-2.0
#include "core/image_format.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/image_metadata.hpp"
#include "core/sealed_block.hpp"

#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <string_view>
#include <utility>

namespace gpustasis::format {
namespace {

constexpr std::size_t kHeaderReserved = 163;
constexpr std::size_t kTrailerReserved = 16;
constexpr std::size_t kIndexEntryReserved = 1;

constexpr BlockKind kHeader{.magic = std::string_view("\x93"
                                                      "GPUSIM\n",
                                                      8),
                            .header_size = kHeaderSize,
                            .wrong_magic = "not an image: wrong magic",
                            .wrong_hash = "header does not match its checksum",
                            .features = kParent | kCpuMemory | kAlike | kFiles | kDevice};

Bytes trailer_magic() noexcept {
    return std::as_bytes(std::span("GPUSEND\n", 8));
}

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

// That the stored bytes of a chunk with a source can be in that source's file.
void check_source(const IndexEntry& entry, const std::vector<Source>& sources) {
    if (entry.source > sources.size())
        corrupt("there is no source " + std::to_string(entry.source));
    const std::uint64_t size = sources[entry.source - 1U].file_size;
    if (entry.offset > size || entry.stored_size > size - entry.offset)
        corrupt("lies beyond the end of its source");
}

} // namespace

std::vector<std::byte> pack_header(const Header& header) {
    FieldWriter out =
        begin_block(kHeader,
                    (header.parent_id == Id{} ? std::uint64_t{0} : kParent) |
                        (header.has_cpu_memory ? kCpuMemory : std::uint64_t{0}) |
                        (header.has_alike ? kAlike : std::uint64_t{0}) |
                        (header.kind == MemoryKind::files ? kFiles : std::uint64_t{0}) |
                        (header.of_devices ? kDevice : std::uint64_t{0}),
                    kHeaderSize);
    out.append(header.checkpoint_id);
    out.append(header.parent_id);
    out.number(header.pid);
    out.number(header.chunk_size);
    out.number(header.alignment);
    out.number(static_cast<std::uint8_t>(header.kind));
    out.reserved(kHeaderReserved);
    return seal(std::move(out));
}

Header unpack_header(Bytes bytes) {
    auto [in, required, hash] = open_block(bytes, kHeader);
    Header header;
    header.hash = hash;
    header.checkpoint_id = in.id();
    header.parent_id = in.id();
    if ((header.parent_id != Id{}) != ((required & kParent) != 0))
        corrupt("parent and features contradict each other");
    header.pid = in.number<std::uint32_t>();
    header.chunk_size = in.number<std::uint32_t>();
    header.alignment = in.number<std::uint32_t>();
    header.kind = unpack_image_kind(in);
    if ((header.kind == MemoryKind::files) != ((required & kFiles) != 0))
        corrupt("kind and features contradict each other");
    header.has_cpu_memory = (required & kCpuMemory) != 0;
    header.has_alike = (required & kAlike) != 0;
    header.of_devices = (required & kDevice) != 0;
    in.reserved(kHeaderReserved);
    if (!std::has_single_bit(header.alignment) || header.alignment > kMaxAlignment)
        corrupt("alignment out of range: " + std::to_string(header.alignment));
    return header;
}

void pack_index_entry(const IndexEntry& entry, MutBytes out) noexcept {
    auto put = [at = out.data()](const auto& value) mutable {
        std::memcpy(at, &value, sizeof value);
        at += sizeof value;
    };
    put(entry.plain_hash);
    put(entry.offset);
    put(entry.stored_hash);
    put(entry.stored_size);
    put(entry.encoding);
    put(entry.source);
    put(std::array<std::byte, kIndexEntryReserved>{});
}

IndexEntry unpack_index_entry(Bytes bytes, std::uint32_t plain_size,
                              const std::vector<Source>& sources) {
    FieldReader in(bytes);
    IndexEntry entry;
    entry.plain_hash = in.id();
    entry.offset = in.number<std::uint64_t>();
    entry.stored_hash = in.number<std::uint64_t>();
    entry.stored_size = in.number<std::uint32_t>();
    const auto encoding = in.number<std::uint8_t>();
    entry.source = in.number<std::uint16_t>();
    in.reserved(kIndexEntryReserved);

    entry.encoding = static_cast<Encoding>(encoding);
    if (!is_packed(entry.encoding) && entry.stored_hash != 0)
        corrupt("stored hash of a chunk that is not lz4");
    switch (entry.encoding) {
    case Encoding::zero:
        if (entry.stored_size != 0 || entry.offset != 0 || entry.source != 0)
            corrupt("zero chunk has a place in a file");
        return entry;
    case Encoding::lz4:
        if (entry.stored_size == 0 || entry.stored_size >= plain_size)
            corrupt("size of lz4 chunk out of range");
        break;
    case Encoding::raw:
        if (entry.stored_size != plain_size)
            corrupt("raw chunk has the wrong size");
        break;
    default: corrupt("unknown encoding " + std::to_string(encoding));
    }
    if (entry.source != 0)
        check_source(entry, sources);
    return entry;
}

std::vector<std::byte> pack_trailer(const Trailer& trailer) {
    FieldWriter out(kTrailerSize);
    out.number(trailer.metadata_offset);
    out.number(trailer.metadata_size);
    out.append(trailer.metadata_hash);
    out.number(trailer.index_offset);
    out.number(trailer.chunk_count);
    out.append(trailer.index_hash);
    out.append(trailer.header_hash);
    out.number(trailer.file_size);
    out.reserved(kTrailerReserved);
    out.append(trailer_magic());
    return seal(std::move(out));
}

Trailer unpack_trailer(Bytes bytes) {
    FieldReader in(bytes);
    Trailer trailer;
    trailer.metadata_offset = in.number<std::uint64_t>();
    trailer.metadata_size = in.number<std::uint64_t>();
    trailer.metadata_hash = in.id();
    trailer.index_offset = in.number<std::uint64_t>();
    trailer.chunk_count = in.number<std::uint64_t>();
    trailer.index_hash = in.id();
    trailer.header_hash = in.id();
    trailer.file_size = in.number<std::uint64_t>();
    const Bytes reserved = in.take(kTrailerReserved);
    if (!std::ranges::equal(in.take(trailer_magic().size()), trailer_magic()))
        corrupt("does not end as an image does: cut short, or never finished");
    trailer.digest = check_seal(bytes, "trailer does not match its checksum");
    FieldReader(reserved).reserved(kTrailerReserved);
    return trailer;
}

} // namespace gpustasis::format
