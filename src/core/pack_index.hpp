// SPDX-License-Identifier: Apache-2.0
/// The index of a pack, and where in its content each file lies.
#pragma once

#include "core/bytes.hpp"
#include "core/file_pack.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace gpustasis::format {

inline constexpr std::size_t kPackHeadSize = 32;
inline constexpr std::uint64_t kMaxPackedFiles = 1U << 18;
inline constexpr std::uint64_t kMaxPackIndexSize = 128U << 20;
inline constexpr std::uint64_t kMaxPackSize = std::uint64_t{1} << 52;
inline constexpr std::uint32_t kPackedModeBits = 0777;

/// What the content begins with.
struct PackHead {
    std::uint64_t file_count = 0;
    std::uint64_t index_size = 0; ///< bytes of all entries
};

/// Head and entries, padded to whole pages. Throws Error: bad_argument past a limit.
std::vector<std::byte> encode_pack_index(const std::vector<PackedFile>& files);

/// `bytes` is kPackHeadSize long. Throws Error: corrupt_data.
PackHead decode_pack_head(Bytes bytes);
/// `bytes` is head.index_size long. Throws Error: corrupt_data unless these are as many entries, with
/// names in ascending order that can be packed.
std::vector<PackedFile> decode_pack_entries(Bytes bytes, const PackHead& head);

/// Where each file begins, and then where the last one's padding ends. Throws Error: corrupt_data past a
/// limit.
std::vector<std::uint64_t> place_packed(const std::vector<PackedFile>& files,
                                        std::uint64_t index_size);

} // namespace gpustasis::format
