// SPDX-License-Identifier: Apache-2.0
/// Header, index and trailer of an image file (docs/format.md), each as a struct with pack and
/// unpack. Unpacking checks the part's hash and limits; the reader checks what joins the parts.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_codec.hpp"
#include "core/image_info.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpustasis::format {

inline constexpr std::size_t kHeaderSize = 256;
inline constexpr std::size_t kTrailerSize = 128;
inline constexpr std::size_t kIndexEntrySize = 40;
/// Of the u16 source in a packed entry.
inline constexpr std::size_t kIndexSourceOffset = 37;

inline constexpr std::uint32_t kMaxAlignment = 4096;

constexpr std::uint64_t align_up(std::uint64_t offset, std::uint64_t alignment) noexcept {
    return (offset + alignment - 1) & ~(alignment - 1);
}

struct Header {
    Id checkpoint_id{};
    Id parent_id{};
    std::uint32_t pid = 0;
    std::uint32_t chunk_size = 0;
    std::uint32_t alignment = 0;
    MemoryKind kind = MemoryKind::gpu;
    bool has_cpu_memory = false; ///< it, or one of its sources, is of MemoryKind::cpu
    bool has_alike = false;      ///< one of its sources is of the same checkpoint
    bool of_devices = false;     ///< as ImageInfo::of_devices
    Id hash{};                   ///< set by unpack_header
};

std::vector<std::byte> pack_header(const Header& header);
/// `bytes` is kHeaderSize long. Throws Error: corrupt_data, unsupported.
Header unpack_header(Bytes bytes);

struct IndexEntry {
    Id plain_hash{};
    std::uint64_t offset = 0;
    std::uint64_t stored_hash = 0;
    std::uint32_t stored_size = 0;
    Encoding encoding = Encoding::zero;
    std::uint16_t source = 0; ///< 0: this file; n: the n-th source
};

/// `out` is kIndexEntrySize long.
void pack_index_entry(const IndexEntry& entry, MutBytes out) noexcept;
/// Of a chunk of `plain_size` bytes in an image with these sources. `bytes` is kIndexEntrySize
/// long. Checks what one entry can show by itself. Throws Error: corrupt_data.
IndexEntry unpack_index_entry(Bytes bytes, std::uint32_t plain_size,
                              const std::vector<Source>& sources);

struct Trailer {
    std::uint64_t metadata_offset = 0;
    std::uint64_t metadata_size = 0;
    Id metadata_hash{};
    std::uint64_t index_offset = 0;
    std::uint64_t chunk_count = 0;
    Id index_hash{};
    Id header_hash{};
    std::uint64_t file_size = 0;
    Id digest{}; ///< trailer_hash; set by unpack_trailer
};

std::vector<std::byte> pack_trailer(const Trailer& trailer);
/// `bytes` is kTrailerSize long. Throws Error: corrupt_data.
Trailer unpack_trailer(Bytes bytes);

} // namespace gpustasis::format
