// SPDX-License-Identifier: Apache-2.0
/// XXH3 for processors with AVX2; hash.hpp is for everybody else to call.
#pragma once

#include <cstddef>
#include <cstdint>

namespace gpustasis {

// Nothing inline is in this header: what is compiled for AVX2 must not be what the linker keeps for
// all.

/// `out` gets 16 bytes, canonical.
void hash128_avx2(const std::byte* data, std::size_t size, std::byte* out) noexcept;
std::uint64_t hash64_avx2(const std::byte* data, std::size_t size) noexcept;

} // namespace gpustasis
