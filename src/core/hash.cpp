// SPDX-License-Identifier: Apache-2.0
#include "core/hash.hpp"

#ifdef GPUSTASIS_XXHASH_DISPATCH
#define XXH_STATIC_LINKING_ONLY // XXH3_state_t by value
#include <xxh_x86dispatch.h>    // XXH3_... become XXH3_..._dispatch
#else
#define XXH_INLINE_ALL
#include <xxhash.h>
#endif

#include <array>
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

// The library notes which code this processor gets at the first long input, without a lock: let
// that be on one thread, before any other hashes.
void choose_code() noexcept {
#ifdef GPUSTASIS_XXHASH_DISPATCH
    [[maybe_unused]] static const XXH128_hash_t chosen = [] {
        constexpr std::array<std::byte, 1024> kLong{};
        return XXH3_128bits(kLong.data(), kLong.size());
    }();
#endif
}

} // namespace

Id hash128(Bytes bytes) noexcept {
    choose_code();
    return canonical_id(XXH3_128bits(bytes.data(), bytes.size()));
}

struct StreamHash128::State {
    XXH3_state_t xxh3;
};

StreamHash128::StreamHash128() : state_(std::make_unique<State>()) {
    choose_code();
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
    choose_code();
    return XXH3_64bits(bytes.data(), bytes.size());
}

} // namespace gpustasis
