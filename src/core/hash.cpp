#include "core/hash.hpp"

#include "core/hash_avx2.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace cudackpt {
#ifdef CUDACKPT_HASH_AVX2
namespace {

bool has_avx2() noexcept {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}

} // namespace
#endif

Id hash128(Bytes bytes) noexcept {
#ifdef CUDACKPT_HASH_AVX2
    if (has_avx2()) {
        Id fast;
        hash128_avx2(bytes.data(), bytes.size(), fast.data());
        return fast;
    }
#endif
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(bytes.data(), bytes.size()));
    Id id;
    static_assert(sizeof id == sizeof canonical);
    std::memcpy(id.data(), canonical.digest, sizeof id);
    return id;
}

std::uint64_t hash64(Bytes bytes) noexcept {
#ifdef CUDACKPT_HASH_AVX2
    if (has_avx2())
        return hash64_avx2(bytes.data(), bytes.size());
#endif
    return XXH3_64bits(bytes.data(), bytes.size());
}

} // namespace cudackpt
