// SPDX-License-Identifier: Apache-2.0
#include "core/image_format.hpp"

#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/hash.hpp"

#include <array>
#include <bit>
#include <cstring>
#include <string>

namespace gpustasis::format {
namespace {

constexpr std::size_t kHashSize = sizeof(Id);
constexpr std::size_t kHeaderReserved = 164;
constexpr std::size_t kTrailerReserved = 16;
constexpr std::size_t kIndexEntryReserved = 1;

Bytes header_magic() noexcept {
    return std::as_bytes(std::span("\x93"
                                   "GPUSIM\n",
                                   8));
}
Bytes trailer_magic() noexcept {
    return std::as_bytes(std::span("GPUSEND\n", 8));
}

[[noreturn]] void corrupt(const std::string& what) {
    throw Error(Errc::corrupt_data, what);
}

// Appends the hash of all fields so far.
std::vector<std::byte> seal(FieldWriter& out) {
    out.append(hash128(out.bytes()));
    return out.take();
}

// The hash that ends `bytes`, once it is found to be right.
Id check_seal(Bytes bytes, const char* part) {
    const Id hash = hash_at_end(bytes);
    if (hash != hash128(bytes.first(bytes.size() - kHashSize)))
        corrupt(std::string(part) + " does not match its checksum");
    return hash;
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

Id hash_at_end(Bytes packed) {
    return FieldReader(packed.last(kHashSize)).id();
}

void check_required_features(std::uint64_t bits) {
    if ((bits & kEncryption) != 0)
        throw Error(Errc::unsupported, "is encrypted, which this version cannot read");
    if ((bits & ~kParent) != 0)
        throw Error(Errc::unsupported, "needs features this version does not know (bits " +
                                           std::to_string(bits) + ")");
}

std::vector<std::byte> pack_header(const Header& header) {
    FieldWriter out(kHeaderSize);
    out.append(header_magic());
    out.number(kVersion);
    out.number(static_cast<std::uint32_t>(kHeaderSize));
    out.number(header.parent_id == Id{} ? 0 : kParent);
    out.number(std::uint64_t{0}); // optional_features
    out.append(header.checkpoint_id);
    out.append(header.parent_id);
    out.number(header.pid);
    out.number(header.chunk_size);
    out.number(header.alignment);
    out.reserved(kHeaderReserved);
    return seal(out);
}

Header unpack_header(Bytes bytes) {
    FieldReader in(bytes);
    if (!std::ranges::equal(in.take(header_magic().size()), header_magic()))
        corrupt("not an image: wrong magic");
    // Before the version, so that a damaged version is called damaged.
    Header header;
    header.hash = check_seal(bytes, "header");
    const auto version = in.number<std::uint32_t>();
    if (version != kVersion)
        throw Error(Errc::unsupported, "has format version " + std::to_string(version) +
                                           ", this build reads " + std::to_string(kVersion));
    if (in.number<std::uint32_t>() != kHeaderSize)
        corrupt("header has the wrong size");
    const auto required = in.number<std::uint64_t>();
    check_required_features(required);
    in.number<std::uint64_t>(); // optional_features
    header.checkpoint_id = in.id();
    header.parent_id = in.id();
    if ((header.parent_id != Id{}) != ((required & kParent) != 0))
        corrupt("parent and features contradict each other");
    header.pid = in.number<std::uint32_t>();
    header.chunk_size = in.number<std::uint32_t>();
    header.alignment = in.number<std::uint32_t>();
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
    if (entry.encoding != Encoding::lz4 && entry.stored_hash != 0)
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
    return seal(out);
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
    trailer.digest = check_seal(bytes, "trailer");
    FieldReader(reserved).reserved(kTrailerReserved);
    return trailer;
}

} // namespace gpustasis::format
