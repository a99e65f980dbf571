// SPDX-License-Identifier: Apache-2.0
/// What an image and a manifest have in common (docs/format.md): magic, version and feature bits at
/// the beginning, a hash of all that is before it at the end.
#pragma once

#include "core/bytes.hpp"
#include "core/fields.hpp"
#include "core/image_info.hpp"

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

namespace gpustasis::format {

inline constexpr std::uint32_t kVersion = 1;
inline constexpr std::size_t kHashSize = sizeof(Id);

/// Bits of required_features.
inline constexpr std::uint64_t kParent = 1U << 0;
inline constexpr std::uint64_t kEncryption = 1U << 1;
inline constexpr std::uint64_t kRequirements = 1U << 2; ///< of manifests only
inline constexpr std::uint64_t kCpuMemory = 1U << 3;    ///< something in it is of MemoryKind::cpu
inline constexpr std::uint64_t kAlike = 1U << 4;        ///< of images only: a source is of depth 0
inline constexpr std::uint64_t kFiles = 1U << 5; ///< it holds files, or a file holds CRIU's images
inline constexpr std::uint64_t kDevice = 1U
                                         << 6; ///< of images only: regions are RegionKind::device

/// One kind of block, and the words for one that is none or is damaged.
struct BlockKind {
    std::string_view magic;
    std::uint32_t header_size = 0; ///< as the block says it: of its part that is always there
    const char* wrong_magic = nullptr;
    const char* wrong_hash = nullptr;
    std::uint64_t features = kParent; ///< required ones that this build can read in it
};

/// Begins a block: the caller puts the other fields behind, and then calls seal(). `size`: of all
/// of it, as far as that is known.
FieldWriter begin_block(const BlockKind& kind, std::uint64_t required_features, std::size_t size);

/// All fields of `out`, with their hash behind them.
std::vector<std::byte> seal(FieldWriter out);

/// A block that was found sound.
struct OpenBlock {
    FieldReader fields; ///< those behind the feature bits; the hash is not taken off their end
    std::uint64_t required_features = 0;
    Id hash{};
};

/// Checks magic and hash, then version, size and features: what is damaged is never called new.
/// Throws Error: corrupt_data; unsupported, in words, if this build cannot read such a block.
OpenBlock open_block(Bytes bytes, const BlockKind& kind);

/// The hash that ends what seal() gave.
Id hash_at_end(Bytes sealed);

/// The same, once it is found to be right. Throws Error: corrupt_data with `wrong_hash`, also if
/// `sealed` is too short for one.
Id check_seal(Bytes sealed, const char* wrong_hash);

} // namespace gpustasis::format
