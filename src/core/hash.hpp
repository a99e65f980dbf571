/// The hashes of docs/format.md: XXH3 with seed 0.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"

#include <cstdint>

namespace cudackpt {

/// XXH3-128 in canonical form, that is, big-endian.
Id hash128(Bytes bytes) noexcept;

/// XXH3-64.
std::uint64_t hash64(Bytes bytes) noexcept;

} // namespace cudackpt
