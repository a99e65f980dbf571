#include "core/hash.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace cudackpt {

Id hash128(Bytes bytes) noexcept {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
    Id id;
    static_assert(sizeof id == sizeof canonical);
    std::memcpy(id.data(), canonical.digest, sizeof id);
    return id;
}

std::uint64_t hash64(Bytes bytes) noexcept {
    return XXH3_64bits(bytes.data(), bytes.size());
}

} // namespace cudackpt
