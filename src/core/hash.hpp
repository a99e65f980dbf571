// SPDX-License-Identifier: Apache-2.0
/// The hashes of docs/format.md: XXH3 with seed 0.
#pragma once

#include "core/bytes.hpp"
#include "core/image_info.hpp"

#include <cstdint>
#include <memory>

namespace gpustasis {

/// XXH3-128 in canonical form, that is, big-endian.
Id hash128(Bytes bytes) noexcept;

/// hash128() of bytes that come one piece after the other.
class StreamHash128 {
public:
    StreamHash128();
    ~StreamHash128();

    void add(Bytes bytes) noexcept;
    Id value() const noexcept; ///< of all so far

private:
    struct State;
    std::unique_ptr<State> state_;
};

/// XXH3-64.
std::uint64_t hash64(Bytes bytes) noexcept;

} // namespace gpustasis
