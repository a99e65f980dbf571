// SPDX-License-Identifier: Apache-2.0
/// The metadata block of an image (docs/format.md) and the limits of what an image can say.
#pragma once

#include "core/bytes.hpp"
#include "core/chunk_codec.hpp"
#include "core/error.hpp"
#include "core/fields.hpp"
#include "core/image_info.hpp"

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace gpustasis::format {

inline constexpr std::size_t kMetadataFixedSize = 96;
inline constexpr std::size_t kGpuSize = 280;
inline constexpr std::size_t kRegionSize = 24;
inline constexpr std::size_t kSourceSize = 48;

inline constexpr std::uint64_t kPageSize = 4096;
inline constexpr std::uint64_t kMaxAddress = std::uint64_t{1} << 57;
inline constexpr std::uint64_t kMaxChunks = 1U << 25;
inline constexpr std::uint32_t kMaxRegions = 1U << 20;
inline constexpr std::uint32_t kMaxGpus = 256;
inline constexpr std::uint32_t kMaxSources = 65535;
inline constexpr std::uint32_t kMaxDepth = 65535;
inline constexpr std::uint64_t kMaxFileSize = std::uint64_t{1} << 62; ///< what an off_t can hold
inline constexpr std::uint32_t kMaxPid = 0x7fffffff;
inline constexpr std::uint32_t kMaxState = 3; ///< of ProcessState
inline constexpr std::size_t kCommWidth = 16;
inline constexpr std::size_t kDriverVersionWidth = 32;
inline constexpr std::size_t kGpuNameWidth = 256;

/// The largest metadata block there can be, in bytes.
inline constexpr std::size_t kMaxMetadataSize = kMetadataFixedSize + kGpuSize * kMaxGpus +
                                                kRegionSize * kMaxRegions +
                                                kSourceSize * kMaxSources;

/// Throws Error with code `blame` if `info` breaks a limit of docs/format.md.
void check_info(const ImageInfo& info, Errc blame);

/// The same for what image and manifest have in common.
void check_machine(const std::string& driver_version, const std::vector<GpuInfo>& gpus, Errc blame);

/// `info` has passed check_info().
std::vector<std::byte> pack_metadata(const ImageInfo& info);

/// Fill in everything of `info` that the header does not hold. The caller checks the hash first
/// and check_info() after. Throws Error: corrupt_data.
void unpack_metadata(Bytes bytes, ImageInfo& info);

/// A number that is one, of memory. Throws Error: corrupt_data.
MemoryKind unpack_kind(FieldReader& in);
/// The same, of an image, which may hold files.
MemoryKind unpack_image_kind(FieldReader& in);

/// Whether `info`, or one of its sources, is of MemoryKind::cpu: its header must say so.
bool has_cpu_memory(const ImageInfo& info) noexcept;

/// Whether a source of `info` is an image of the same checkpoint: its header must say so.
bool has_alike(const ImageInfo& info) noexcept;

/// Which image has the bytes of a chunk whose index entry names `source`: 0, or one of `sources`.
Holder holder_of(std::uint16_t source, const std::vector<Source>& sources) noexcept;

void pack_gpus(const std::vector<GpuInfo>& gpus, FieldWriter& out);
std::vector<GpuInfo> unpack_gpus(std::uint32_t count, FieldReader& in);

} // namespace gpustasis::format
