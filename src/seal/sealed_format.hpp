// SPDX-License-Identifier: Apache-2.0
/// The sealed file of docs/format.md: its fields, as numbers.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"
#include "seal/frame_cipher.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace gpustasis::seal {

inline constexpr const char* kSealedName = "gpustasis-sealed.img"; ///< of file 1
inline constexpr const char* kEnvelopeName = "gpustasis-sealed.cms";

inline constexpr std::uint32_t kSealedFile = 1; ///< its number among the files of a checkpoint
inline constexpr std::uint32_t kFirstOther = 2;
inline constexpr std::uint32_t kMaxFileId = 1U << 18;
inline constexpr std::size_t kSealedHeaderSize = 128;
inline constexpr std::size_t kFrameHeaderSize = 16;
inline constexpr std::size_t kFrameOverhead = kFrameHeaderSize + kTagSize;
inline constexpr std::size_t kEndSize = 64; ///< plain bytes of the end frame

inline constexpr std::uint32_t kMinSealedFrame = 4U << 10;
inline constexpr std::uint32_t kMaxSealedFrame = 4U << 20;
inline constexpr std::uint32_t kDefaultSealedFrame = 1U << 20;
/// Of images. A chunk is read by itself, and with it every frame that it touches: with 128 KiB that was half as much
/// again and more. Below this the cipher gets slower.
inline constexpr std::uint32_t kSealedImageFrame = 32U << 10;
inline constexpr std::uint64_t kMaxSealedFiles = 1U << 18;
inline constexpr std::uint64_t kMaxIndexSize = 128U << 20;
inline constexpr std::uint64_t kMaxContentSize = std::uint64_t{1} << 52; ///< a frame number fits
inline constexpr std::size_t kMaxNameSize = 255;
inline constexpr std::uint32_t kModeBits = 0777;

struct SealedHeader {
    Id sealed_id{};
    std::uint32_t frame_size =
        kDefaultSealedFrame; ///< plain bytes of all frames but the last of a kind
    std::uint32_t file_id = kSealedFile;
    bool is_single = false;    ///< the content is the bytes of one file, without its entry
    bool lists_others = false; ///< the index lists the other sealed files; of kSealedFile only
};

enum class FrameKind : std::uint8_t { content = 0, index = 1, end = 2 };

/// Stands before a sealed frame, in the clear, and is the data associated with it.
struct FrameHeader {
    std::uint64_t number = 0;
    std::uint32_t plain_size = 0;
    FrameKind kind = FrameKind::content;
};

/// One file of the checkpoint.
struct SealedEntry {
    std::string name;
    std::uint32_t mode = 0;
    std::uint64_t size = 0;
    std::uint64_t mtime_ns = 0; ///< since 1970

    friend bool operator==(const SealedEntry&, const SealedEntry&) = default;
};

using Tag = std::array<std::byte, kTagSize>;

/// Another sealed file of the same checkpoint.
struct OtherFile {
    std::uint32_t file_id = 0;
    Tag end_tag{}; ///< its last bytes

    friend bool operator==(const OtherFile&, const OtherFile&) = default;
};

/// What the end frame holds. The size follows from the others, the number of other files apart, and
/// the frame size.
struct SealedEnd {
    std::uint64_t content_size = 0;
    std::uint64_t index_size = 0;
    std::uint64_t file_count = 0;
    std::uint64_t file_size = 0; ///< of the sealed file
    std::uint64_t other_count = 0;
};

/// How many frames `size` bytes take.
constexpr std::uint64_t frames_for(std::uint64_t size, std::uint32_t frame_size) noexcept {
    return size / frame_size + (size % frame_size != 0 ? 1 : 0);
}
/// Where `size` bytes in frames end that begin at `offset`.
constexpr std::uint64_t end_of_frames(std::uint64_t offset, std::uint64_t size,
                                      std::uint32_t frame_size) noexcept {
    return offset + size + frames_for(size, frame_size) * kFrameOverhead;
}

/// kSealedName, or "gpustasis-sealed-<file_id>.img".
std::string sealed_name(std::uint32_t file_id);
/// The number of the sealed file of that name; 0: it is none.
std::uint32_t sealed_file_id(std::string_view name) noexcept;

/// False for what could lead out of a directory, or is a name of ours for sealed files.
bool can_be_sealed(const std::string& name);

std::vector<std::byte> encode_header(const SealedHeader& header);
/// Throws Error: corrupt_data; unsupported for another version or a feature that is not known.
SealedHeader decode_header(Bytes bytes);

std::array<std::byte, kFrameHeaderSize> encode_frame_header(const FrameHeader& header);

/// An entry, as it stands before the content of its file and again in the index.
std::vector<std::byte> encode_entry(const SealedEntry& entry);
std::size_t entry_size(const SealedEntry& entry) noexcept;

struct SealedIndex {
    std::vector<SealedEntry> entries; ///< ascending by name
    std::vector<OtherFile> others;    ///< ascending by number
};
std::vector<std::byte> encode_index(const SealedIndex& index);
/// All of the index. Throws Error: corrupt_data unless it has as many entries as `end` says, with names
/// in ascending order that can be sealed, then as many other files, in ascending order, and nothing else.
SealedIndex decode_index(Bytes bytes, const SealedEnd& end);

std::vector<std::byte> encode_end(const SealedEnd& end);
/// Throws Error: corrupt_data for sizes that do not give `file_size`, or are past a limit.
SealedEnd decode_end(Bytes bytes, const SealedHeader& header, std::uint64_t file_size);

} // namespace gpustasis::seal
