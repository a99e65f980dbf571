// SPDX-License-Identifier: Apache-2.0
#include "core/hash.hpp"

#include "core/hash_avx2.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

#include <cstring>

namespace gpustasis {
namespace {

Id canonical_id(const XXH128_hash_t& hash) noexcept {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, hash);
    Id id;
    static_assert(sizeof id == sizeof canonical);
    std::memcpy(id.data(), canonical.digest, sizeof id);
    return id;
}

} // namespace

#ifdef GPUSTASIS_HASH_AVX2
namespace {

bool has_avx2() noexcept {
    static const bool has = __builtin_cpu_supports("avx2");
    return has;
}

} // namespace
#endif

Id hash128(Bytes bytes) noexcept {
#ifdef GPUSTASIS_HASH_AVX2
    if (has_avx2()) {
        Id fast;
        hash128_avx2(bytes.data(), bytes.size(), fast.data());
        return fast;
    }
#endif
    return canonical_id(XXH3_128bits(bytes.data(), bytes.size()));
}

struct StreamHash128::State {
    XXH3_state_t xxh3;
};

StreamHash128::StreamHash128() : state_(std::make_unique<State>()) {
    XXH3_128bits_reset(&state_->xxh3);
}
StreamHash128::~StreamHash128() = default;

void StreamHash128::add(Bytes bytes) noexcept {
    XXH3_128bits_update(&state_->xxh3, bytes.data(), bytes.size());
}

Id StreamHash128::value() const noexcept {
    return canonical_id(XXH3_128bits_digest(&state_->xxh3));
}

std::uint64_t hash64(Bytes bytes) noexcept {
#ifdef GPUSTASIS_HASH_AVX2
    if (has_avx2())
        return hash64_avx2(bytes.data(), bytes.size());
#endif
    return XXH3_64bits(bytes.data(), bytes.size());
}

} // namespace gpustasis
